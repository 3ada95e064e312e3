"""The profiles that have a name: the constants of the paper's authors, and rooflines."""

from dataclasses import replace
from pathlib import Path

from jinfercept.errors import ConfigError
from jinfercept.sched.data_sheets import ACCELERATORS, REACHED_BANDWIDTH, REACHED_FLOPS
from jinfercept.sched.profile import Profile
from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_13B, QWEN_32B_FP8, roofline


def _paper(name: str, per_query_s: float, fixed_s: float, budget: float, kv_bytes_per_token: int) -> Profile:
    # the constants of the InferCept authors' code, in which reading context is free, S is 384, and `budget` is the number of
    # tokens that the link moves in a saturated iteration, both directions together
    link = budget / (fixed_s + per_query_s * 384)
    return Profile(
        name=name,
        source="paper",
        fixed_s=fixed_s,
        per_query_s=per_query_s,
        per_context_s=0.0,
        saturation=384,
        link_out_tokens_per_s=link,
        link_in_tokens_per_s=link,
        link_both_tokens_per_s=link,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def _with_attention(paper: Profile, *, num_layers: int, hidden_size: int, num_gpus: int) -> Profile:
    # the authors' constants lack the cost of reading contexts: it comes from the data sheet of their accelerator
    sheet = ACCELERATORS["A100-40GB"]
    return replace(
        paper,
        name=f"{paper.name}-attention",
        per_context_s=paper.kv_bytes_per_token / (sheet.memory_bytes_per_s * REACHED_BANDWIDTH * num_gpus),
        per_pair_s=4 * num_layers * hidden_size / (sheet.bf16_flops * REACHED_FLOPS * num_gpus),
    )


GPTJ_6B = _paper("paper-gptj-6b-a100", 0.0463e-3, 10.0e-3, 605.5, 448 * 1024)
VICUNA_13B = _paper("paper-vicuna-13b-2xa100", 0.0279e-3, 15.4e-3, 318.8, 800 * 1024)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        GPTJ_6B,
        VICUNA_13B,
        _with_attention(GPTJ_6B, num_layers=28, hidden_size=4096, num_gpus=1),
        _with_attention(VICUNA_13B, num_layers=40, hidden_size=5120, num_gpus=2),
        replace(roofline(LLAMA_13B, "A100-80GB"), name="roofline-llama-13b-a100"),
        replace(roofline(LLAMA_13B, "A100-80GB", 2), name="roofline-llama-13b-2xa100"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 4), name="roofline-llama-3-70b-4xa100"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 8), name="roofline-llama-3-70b-8xa100"),
        roofline(LLAMA_3_70B, "H100", 4),
        replace(roofline(LLAMA_3_8B, "H100", attention=True), name="roofline-llama-3-8b-h100-attention"),
        replace(roofline(LLAMA_3_8B, "H200", attention=True), name="roofline-llama-3-8b-h200-attention"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 8, attention=True), name="roofline-llama-3-70b-8xa100-attention"),
        replace(roofline(QWEN_32B_FP8, "H100", attention=True), name="roofline-qwen2.5-32b-fp8-h100-attention"),
        replace(roofline(LLAMA_2_7B, "A100-40GB", attention=True), name="roofline-yarn-llama-2-7b-64k-a100-40gb"),
    )
}
"""By name."""


def load_profile(name_or_path: str | Path) -> Profile:
    """A named profile (`PROFILES`), or one from a JSON file. Raises `ConfigError` if there is neither."""
    if isinstance(name_or_path, str) and name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # the name or the text is not Unicode
        raise ConfigError(
            "no such profile", got=name_or_path, fix=f"a JSON file, or one of {', '.join(PROFILES)}"
        ) from None
    return Profile.from_json(text, str(name_or_path))
