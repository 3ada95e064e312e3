"""A runner's executables for GPT-J-6B and Llama-3-8B compile ahead of time, in place: no copies of weights, none of KV.

Transfers too, for both ways: whole pages, and in parts of the layers.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import pytest

from jinfercept.runner.page_transfers import GPU_TRANSFERS
from jinfercept.start.sizing import buckets
from tests.aot.cuda import compile_for

MODELS = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 4,  # of 32, all alike
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"],
        "vocab_size": 50_400,
        "n_embd": 4096,
        "n_layer": 4,  # of 28, all alike
        "n_head": 16,
        "rotary_dim": 64,
        "layer_norm_epsilon": 1e-5,
        "n_positions": 2048,
    },
}
MODELS["llama-3-8b, whole"] = MODELS["llama-3-8b"] | {"num_hidden_layers": 32}
MODELS["llama-3-70b"] = MODELS["llama-3-8b"] | {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28_672,
}
MODELS["llama-3-70b"]["num_hidden_layers"] = 2  # of 80
MODELS["gemma-3-1b"] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "num_hidden_layers": 4,  # of 26
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
MODELS["gemma-4-e2b"] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "hidden_size": 1536,
    "num_hidden_layers": 4,  # of 35
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
}
MODELS["gemma-4-26b-a4b"] = MODELS["gemma-4-e2b"] | {
    "hidden_size": 2816,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "intermediate_size": 2112,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
MODELS["qwen3-next-80b"] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 4,  # of 48
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "num_experts": 64,  # of 512
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000_000.0,
}
E2B_ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "text_config": MODELS["gemma-4-e2b"]
    | {
        "hidden_size": 256,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0,
        "num_attention_heads": 4,
        "intermediate_size": 2048,
        "use_double_wide_mlp": False,
    },
}
KV_HEADS = {"llama-3-8b": (8, 128), "gpt-j-6b": (16, 256)}
NUM_PAGES, PAGE_SIZE, LAYERS_PER_STEP, BUCKETS = 6000, 16, 2, [64, 256]
LAYER_BYTES = 2 * prod((NUM_PAGES + 1, PAGE_SIZE, 2))  # of the pool in bfloat16, without heads and head dim


def compile_steps(
    model: str,
    gpu: str,
    attention: str = "triton",
    num_devices: int = 1,
    buckets: Sequence[int] = BUCKETS,
    drafts: dict[str, Any] | None = None,
    **sizes: int,
) -> dict[str, dict[str, Any]]:
    shape = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_num_seqs": 64, "max_model_len": 2048}
    shape |= {"buckets": buckets, "layers_per_step": LAYERS_PER_STEP}
    shape |= sizes
    steps = {"model": MODELS[model], "shape": shape, "attention": attention} | (drafts or {})
    compiled = compile_for(gpu, steps=steps, num_devices=num_devices)
    for name, facts in compiled.items():
        assert facts["error"] is None, f"{name}: {facts['error']}"
    return compiled


def check(model: str, gpu: str) -> None:
    compiled = compile_steps(model, gpu)
    layer_bytes = LAYER_BYTES * prod(KV_HEADS[model])
    weight_bytes = 2 * 4096 * prod(KV_HEADS[model])  # of the keys
    num_layers = MODELS[model].get("num_hidden_layers") or MODELS[model]["n_layer"]
    logits_bytes = 4 * 64 * MODELS[model]["vocab_size"]
    for name, facts in compiled.items():
        kind, *sizes = name.removeprefix("decode ").split()
        assert not facts["control_flow"], f"{name}: the host waits for a predicate"
        assert max(facts["sorted"], default=0) < MODELS[model]["vocab_size"] // 16, f"{name} sorts the vocabulary"
        if kind not in ("embed", "layers", "gather", "scatter"):  # what samples knows neither layers nor pages
            assert facts["temp_bytes"] < 6 * logits_bytes, name
            continue
        # What is as large as the smallest weight matrix is the pages, written in place.
        assert facts["temp_bytes"] < 2**25, name
        in_place = {"layers": int(sizes[-1]), "scatter": num_layers}.get(kind, 0)
        assert facts["alias_bytes"] >= in_place * layer_bytes, name
        large = [made for size, made in facts["made"] if size >= weight_bytes]
        assert len(large) <= in_place, (name, large)
        assert all("scatter" in made or "dynamic_update_slice" in made for made in large), (name, large)
    assert {"shape 64", *(f"sample 64 {draw}" for draw in ("greedy", "drawn", "filtered"))} <= compiled.keys()
    assert compiled["logprobs 64"]["sorted"], "sorts are found"
    for pages in GPU_TRANSFERS:
        assert {f"gather {pages}", f"scatter {pages}"} <= compiled.keys()
    for bucket in BUCKETS:
        assert compiled[f"layers {bucket} {LAYERS_PER_STEP}"]["kernels"] == 2 * LAYERS_PER_STEP
    alone = {name: facts["kernels"] for name, facts in compiled.items() if name.startswith("decode layers")}
    assert alone == {f"decode layers {BUCKETS[0]} {LAYERS_PER_STEP}": LAYERS_PER_STEP}, "64 rows fill no larger bucket"


@pytest.mark.slow  # of Llama-3-8B on an H100, the GPU bill has a sample
@pytest.mark.parametrize(("model", "gpu"), product(KV_HEADS, ("h100", "a100")))
def test_aot_steps_of_every_bucket_compile_in_place(model: str, gpu: str) -> None:
    check(model, gpu)


@pytest.mark.slow  # `on_several_devices.py` counts the same collectives on devices of the CPU
@pytest.mark.parametrize(("gpu", "num_devices", "attention"), [("h100", 4, "mosaic"), ("a100", 8, "triton")])
def test_aot_several_gpus_share_layers_in_place_with_two_collectives_each(
    gpu: str, num_devices: int, attention: str
) -> None:
    bucket = 64
    compiled = compile_steps("llama-3-70b", gpu, attention, num_devices=num_devices, buckets=[bucket])
    layer_bytes = LAYER_BYTES * 8 * 128 // num_devices
    key_bytes = 2 * 8192 * 8 * 128 // num_devices
    for decode in ("", "decode "):
        facts = compiled[f"{decode}layers {bucket} {LAYERS_PER_STEP}"]
        assert facts["collectives"] == ["all-reduce"] * 2 * LAYERS_PER_STEP
        assert facts["alias_bytes"] >= LAYERS_PER_STEP * layer_bytes
        large = [made for size, made in facts["made"] if size >= max(key_bytes, 4 * bucket * 8192)]
        assert all("scatter" in made or "dynamic_update_slice" in made for made in large), large
        assert compiled[f"{decode}embed {bucket}"]["collectives"] == ["all-reduce"]
    assert compiled["head 64 64"]["collectives"] == ["all-gather"]
    moving = [name for name in compiled if name.split()[0] in ("gather", "scatter", "sample", "shape", "logprobs")]
    assert moving
    assert not any(compiled[name]["collectives"] for name in moving)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_aot_steps_of_every_bucket_and_long_contexts_compile_with_the_kernel_for_hopper() -> None:
    sizes = buckets(64, 2048, "gpu")
    compiled = compile_steps("llama-3-8b", "h100", "mosaic", buckets=sizes, max_model_len=131_072)
    for bucket in sizes:
        facts = compiled[f"layers {bucket} {LAYERS_PER_STEP}"]
        assert (facts["mosaic_kernels"], facts["kernels"]) == (LAYERS_PER_STEP, LAYERS_PER_STEP)
        assert facts["temp_bytes"] < 2**28
        assert facts["alias_bytes"] >= LAYERS_PER_STEP * LAYER_BYTES * prod(KV_HEADS["llama-3-8b"])


@pytest.mark.slow
def test_aot_steps_write_in_place_into_a_pool_for_windows_too() -> None:
    num_pages, bucket = 2500, BUCKETS[0]
    compiled = compile_steps("gemma-3-1b", "h100", buckets=[bucket], num_window_pages=num_pages)
    windowed_bytes = LAYER_BYTES * 256 * (num_pages + 1) // (NUM_PAGES + 1)
    for decode, kernels in (("", 2), ("decode ", 1)):
        begin = f"{decode}layers {bucket} {LAYERS_PER_STEP} "  # a layer of each pool
        [facts] = [facts for name, facts in compiled.items() if name.startswith(begin)]
        assert facts["kernels"] == kernels * LAYERS_PER_STEP
        assert facts["temp_bytes"] < 2**25
        assert facts["alias_bytes"] >= LAYER_BYTES * 256 + windowed_bytes
        large = [made for size, made in facts["made"] if size >= windowed_bytes // 2]
        assert len(large) <= LAYERS_PER_STEP
        assert all("scatter" in made or "dynamic_update_slice" in made for made in large), large


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize(("model", "heads"), [("gemma-4-e2b", (1, 1)), ("gemma-4-26b-a4b", (2, 8))])
def test_aot_layers_with_other_heads_share_a_step_and_pages_of_other_layers_stay_in_place(
    model: str, heads: tuple[int, int], gpu: str
) -> None:
    """The last two of E2B's four layers read the pages of the first two."""
    num_pages, bucket = 2500, BUCKETS[0]
    compiled = compile_steps(model, gpu, buckets=[bucket], num_window_pages=num_pages)
    windowed_bytes = LAYER_BYTES * heads[1] * 256 * (num_pages + 1) // (NUM_PAGES + 1)
    for decode in ("", "decode "):
        groups = [facts for name, facts in compiled.items() if name.startswith(f"{decode}layers {bucket} ")]
        assert len(groups) == (2 if model == "gemma-4-e2b" else 1)
        for facts in groups:
            assert facts["alias_bytes"] >= LAYER_BYTES * heads[0] * 512 + windowed_bytes
            large = [made for size, made in facts["made"] if size >= windowed_bytes // 2]
            assert all("scatter" in made or "dynamic_update_slice" in made for made in large), large


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_aot_steps_of_recurrent_layers_write_states_in_place(gpu: str) -> None:
    num_states, bucket = 256, BUCKETS[0]
    compiled = compile_steps("qwen3-next-80b", gpu, buckets=[bucket], num_states=num_states)
    row_bytes = 4 * 32 * 128 * 128 + 2 * 3 * 8192
    state_bytes = (num_states + 1) * row_bytes
    groups = [facts for name, facts in compiled.items() if name.startswith(f"layers {bucket} {LAYERS_PER_STEP} ")]
    recurrent, mixed = sorted(groups, key=lambda facts: -facts["alias_bytes"])
    assert recurrent["alias_bytes"] >= 2 * state_bytes
    assert mixed["alias_bytes"] >= state_bytes + LAYER_BYTES * 2 * 256
    tokens_bytes = 320 * 4 * (2 * 16 + 3 * 32) * 128  # queries, keys, values and what they read, padded by a block
    assert max(facts["temp_bytes"] for facts in groups) < 2 * 32 * row_bytes + tokens_bytes, (
        "32 rows at a time, with drafts"
    )
    num_recurrent = 3
    assert compiled["states scatter 1"]["alias_bytes"] >= num_recurrent * state_bytes
    slot_bytes = num_recurrent * state_bytes // (num_states + 1)
    for name in ("gather", "scatter"):
        facts = compiled[f"states {name} 1"]
        assert facts["temp_bytes"] < 1.1 * slot_bytes, "what leaves is copied once"
        large = [made for size, made in facts["made"] if size >= state_bytes // 2]
        assert all("dynamic_update_slice" in made or "dynamic-update-slice" in made for made in large), large


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize(
    ("model", "drafts", "sizes", "kernels"),
    [
        ("gemma-4-e2b", {"assistant": E2B_ASSISTANT}, {"num_window_pages": 2500, "is_assisted": True}, 3 * 4),
        ("qwen3-next-80b", {"draft_layer": True}, {"num_states": 256}, 2),
    ],
)
def test_aot_several_drafts_of_a_step_attend_by_schedules_of_the_device(
    model: str, drafts: dict[str, Any], sizes: dict[str, Any], kernels: int, gpu: str
) -> None:
    """An assistant's layers all read pages of the served model; a layer of that itself attends again for each later draft."""
    compiled = compile_steps(model, gpu, buckets=BUCKETS[:1], drafts=drafts, num_drafts=3, **sizes)
    steps = [facts for name, facts in compiled.items() if name.startswith("draft layer") and name.endswith("True")]
    assert len(steps) == 2
    for facts in steps:
        assert facts["kernels"] >= kernels
