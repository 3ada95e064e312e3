"""Golden checkpoints rewritten as llama.cpp's converter writes their families give the logits that transformers gives."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfercept.errors import ModelError
from jinfercept.models.load import load, read_config
from tests.support.dense_model import logits

GOLDEN = Path(__file__).parent.parent / "golden"
RENAMED = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.", "attn_"),
    ("_proj", ""),
    ("mlp.gate_up", "ffn_up"),
    ("mlp.", "ffn_"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)

POST_NORMED = (
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)

GEMMA4 = (
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.embed_tokens", "token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("model.norm", "output_norm"),
    ("model.layers.", "blk."),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.", "attn_"),
    *((f"{name}_proj.", f"{name}.") for name in ("attn_q", "attn_k", "attn_v", "mlp.gate", "mlp.up", "mlp.down")),
    ("mlp.", "ffn_"),
    ("router.proj.weight", "ffn_gate_inp.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    ("post_per_layer_input_norm", "post_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    *POST_NORMED,
)


def of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the converter's Gemma 4."""
    of_window = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = config["per_layer_config"][str(of_window.index(False))]
    num_heads, size = config["num_key_value_heads"], config["intermediate_size"]
    num_shared, count = config["num_kv_shared_layers"], len(of_window)
    facts = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": of_window,
        "attention.shared_kv_layers": num_shared,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    if "num_key_value_heads" in own:
        facts["attention.head_count_kv"] = [num_heads if near else own["num_key_value_heads"] for near in of_window]
    if config["use_double_wide_mlp"]:
        facts["feed_forward_length"] = [size] * (count - num_shared) + [2 * size] * num_shared
    if config["num_experts"]:
        facts |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        facts["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"gemma4.{key}": value for key, value in facts.items() if value is not None}


def convert(
    name: str,
    file: Path,
    architecture: str,
    *,
    numbers: Mapping[str, int] = MappingProxyType({}),
    others: Mapping[str, Any] = MappingProxyType({}),
    factors: Mapping[str, list[float]] = MappingProxyType({}),
    quantised: str | None = None,
    **strings: str,
) -> None:
    """A golden checkpoint, or one in another directory, as a GGUF file in float32.

    Args:
        numbers, strings, others: further metadata, `others` of any type.
        factors: further tensors.
        quantised: type of matrices, but for routers.
    """
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = {}
    for part in sorted((GOLDEN / name).glob("*.safetensors")):
        tensors |= load_file(part)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(16 if architecture == "gemma4" else config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_float32(f"{architecture}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "partial_rotary_factor" in ropes and not numbers:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * ropes["partial_rotary_factor"]))
    for key, number in numbers.items():
        writer.add_uint32(key, number)
    for tensor, divisors in factors.items():
        writer.add_tensor(tensor, np.array(divisors, np.float32))
    if architecture != "gemma4" and (count := config.get("num_local_experts") or config.get("num_experts")) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        tensors = stacked(tensors, count)
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    if name == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if rope["rope_type"] == "linear" and architecture != "gemma3":
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if architecture == "gemma4":
        others = {**others, **of_gemma4(config)}
        share = [1.0] * round(rope["partial_rotary_factor"] * 8) + [1e30] * 8
        writer.add_tensor("rope_freqs.weight", np.array(share[:8], np.float32))
    for key, value in others.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(
            key, value, kind, gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        )
    for tensor, stored in tensors.items():
        if stored.dtype == np.uint8:
            writer.add_tensor(renamed_to(tensor, RENAMED), stored, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        values = stored.astype(np.float32)
        if architecture in ("llama", "granite", "smollm3") and ("q_proj" in tensor or "k_proj" in tensor):
            values = pairs_side_by_side(values, config["head_dim"])
        if architecture in ("gemma", "gemma2", "gemma3") and tensor.endswith("norm.weight"):
            values = values + 1
        renamed = POST_NORMED if architecture in ("gemma2", "gemma3", "olmo2", "gpt-oss") else ()
        tensor = renamed_to(tensor, GEMMA4 if architecture == "gemma4" else (*renamed, *RENAMED))
        if quantised is not None and values.ndim > 1 and values.shape[-1] % 32 == 0 and "gate_inp" not in tensor:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, values)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed_to(tensor: str, renamed: Iterable[tuple[str, str]]) -> str:
    for old, new in renamed:
        tensor = tensor.replace(old, new)
    return tensor


def in_gguf_order(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of MXFP4 with their scales, in whose bytes the first 16 numbers stand before the others."""
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(*scales.shape[:-1], -1)


def stacked(tensors: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The tensors with those of experts as the converter stacks them, side by side."""
    made = {}
    for name, values in tensors.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for side, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                made[name.replace("experts.gate_up_proj", f"{side}_exps.weight")] = part
        elif name.endswith("gate_up_proj_bias"):
            for first, side in enumerate(("gate", "up")):
                made[name.replace("experts.gate_up_proj_bias", f"{side}_exps.bias")] = values[:, first::2]
        elif name.endswith("down_proj_bias"):
            made[name.replace("experts.down_proj_bias", "down_exps.bias")] = values
        elif name.endswith("gate_up_proj_blocks"):
            packed = in_gguf_order(values, tensors[name.replace("_blocks", "_scales")])
            for first, side in enumerate(("gate", "up")):
                made[name.replace("experts.gate_up_proj_blocks", f"{side}_exps.weight")] = packed[:, first::2]
        elif name.endswith("down_proj_blocks"):
            packed = in_gguf_order(values, tensors[name.replace("_blocks", "_scales")])
            made[name.replace("experts.down_proj_blocks", "down_exps.weight")] = packed
        elif name.endswith("sinks"):
            made[f"{name}.weight"] = values
        elif name.endswith("mlp.experts.down_proj"):
            made[name.replace("experts.down_proj", "down_exps.weight")] = values
        elif ".experts.0." in name:
            own = name.split(".")[-2]
            side = {"w1": "gate", "w2": "down", "w3": "up"}.get(own, own.removesuffix("_proj"))
            parts = [tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in range(count)]
            made[".".join([*name.split(".")[:3], f"mlp.{side}_exps.weight"])] = np.stack(parts)
        elif ".experts." not in name:
            renamed = (("block_sparse_moe", "mlp"), ("mlp.gate.weight", "mlp.gate_inp.weight"), ("router", "gate_inp"))
            made[renamed_to(name, renamed)] = values
    return made


def pairs_side_by_side(rows: np.ndarray, head_dim: int) -> np.ndarray:
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rope_factors(rope: dict[str, float], head_dim: int) -> np.ndarray:
    """`generate_extra_tensors` of the converter's Llama."""
    original, low, high = (
        rope[f"{key}"] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(
            1 if wavelength < original / high else rope["factor"] if wavelength > original / low else between
        )
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama_llama3", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("olmo2", "olmo2"),
        ("olmo3", "olmo2"),
        ("llama_yarn", "llama"),
        ("llama_linear", "llama"),
        ("phi3", "phi3"),
        ("granite", "granite"),
        ("gemma", "gemma"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("mixtral", "llama"),
        ("qwen3_moe", "qwen3moe"),
        ("gpt_oss_mxfp4", "gpt-oss"),
        ("gemma4", "gemma4"),
        ("gemma4_moe", "gemma4"),
        ("gemma4_e4b", "gemma4"),
        ("gemma4_e2b", "gemma4"),
    ],
)
def test_float32_logits_are_those_of_transformers(tmp_path, name, architecture):
    convert(name, tmp_path / "m.gguf", architecture)
    loaded, golden = load(tmp_path / "m.gguf", dtype="float32"), np.load(GOLDEN / f"{name}.npz")
    ours, expected = logits(loaded.model, loaded.params, golden["tokens_0"]), golden["logits_0"]
    np.testing.assert_allclose(ours, expected, atol=max(1e-4, 5e-6 * np.abs(expected).max()), rtol=0)


PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("name", "architecture", "values", "expected"),
    [
        ("olmo3", "olmo2", {}, "wwwfw"),
        ("olmo3", "olmo2", {PATTERN: 2}, "wfwfw"),
        ("olmo3", "olmo2", {PATTERN: [True, False, False, True, True]}, "wffww"),
        ("olmo3", "olmo2", {PATTERN: 0}, "wwwww"),
        ("olmo2", "olmo2", {}, ""),
        ("gpt_oss_mxfp4", "gpt-oss", {PATTERN: 3}, "ww"),
        ("llama_linear", "llama", {"attention.sliding_window": 9}, "ww"),
        ("qwen3", "qwen3", {"attention.sliding_window": 0}, ""),
    ],
    ids=str,
)
def test_the_file_says_which_layers_are_windowed(
    tmp_path: Path, name: str, architecture: str, values: dict[str, Any], expected: str
) -> None:
    convert(name, tmp_path / "m.gguf", architecture, others={f"{architecture}.{key}": v for key, v in values.items()})
    config = read_config(tmp_path / "m.gguf")
    assert "".join("f" if kind.window is None else "w" for kind in config.kinds) == expected


@pytest.mark.parametrize(
    ("name", "architecture", "values"),
    [
        ("llama_gqa", "llama", {"attention.scale": 8**-0.5, "attention.value_length": 8, "logit_scale": 1.0}),
        ("llama_gqa", "llama", {"vocab_size": 128, "tensor_data_layout": "Meta AI original pth", "expert_count": 0}),
        ("llama_gqa", "llama", {"rope.scaling.finetuned": True, "attention.causal": True, "rope.scaling.factor": 1.0}),
        ("llama_yarn", "llama", {"rope.scaling.yarn_attn_factor": 1.1386294, "rope.scaling.yarn_ext_factor": 1.0}),
        ("qwen2", "qwen2", {"attention.sliding_window": 0, "pooling_type": 3, "rope.freq_base_swa": 500.0}),
        ("gemma3", "gemma3", {"mm.tokens_per_image": 256, "vision.block_count": 27}),
        ("mixtral", "llama", {"expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_shared_count": 0}),
        ("gpt_oss_mxfp4", "gpt-oss", {"expert_gating_func": 3}),
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_read_over(tmp_path, name, architecture, values):
    convert(name, tmp_path / "plain.gguf", architecture)
    convert(name, tmp_path / "m.gguf", architecture, others={f"{architecture}.{key}": v for key, v in values.items()})
    assert read_config(tmp_path / "m.gguf") == read_config(tmp_path / "plain.gguf")


@pytest.mark.parametrize(
    ("name", "architecture", "key", "value"),
    [
        ("llama_gqa", "llama", "attention.scale", 0.5),
        ("llama_gqa", "llama", "attention.value_length", 16),
        ("llama_gqa", "llama", "attention.causal", False),
        ("llama_gqa", "llama", "attention.clamp_kqv", 8.0),
        ("llama_gqa", "llama", "attn_logit_softcapping", 50.0),
        ("llama_gqa", "llama", "final_logit_softcapping", 30.0),
        ("llama_gqa", "llama", "logit_scale", 8.0),
        ("llama_gqa", "llama", "embedding_scale", 12.0),
        ("llama_gqa", "llama", "residual_scale", 0.22),
        ("qwen3", "qwen3", PATTERN, 4),
        ("llama_gqa", "llama", "rope.freq_base_swa", 77.0),
        ("llama_gqa", "llama", "rope.scaling.yarn_log_multiplier", 0.1),
        ("llama_yarn", "llama", "rope.scaling.yarn_ext_factor", 0.5),
        ("llama_yarn", "llama", "rope.scaling.yarn_attn_factor", 1.5),
        ("qwen2", "qwen2", "attention.sliding_window", 4096),
        ("qwen2", "qwen2", "expert_count", 4),
        ("qwen3", "qwen3", "nextn_predict_layers", 1),
        ("smollm3", "smollm3", "attention.sliding_window", 64),
        ("granite", "granite", "rope.scaling.finetuned", False),
        ("gemma", "gemma", "final_logit_softcapping", 30.0),
        ("gemma3", "gemma3", "attn_logit_softcapping", 50.0),
        ("gemma2", "gemma2", "rope.freq_base_swa", 77.0),
        ("mixtral", "llama", "expert_weights_scale", 2.5),
        ("mixtral", "llama", "expert_shared_count", 1),
        ("qwen3_moe", "qwen3moe", "expert_gating_func", "sigmoid"),
        ("qwen3_moe", "qwen3moe", "expert_gating_func", 2),
        ("qwen3_moe", "qwen3moe", "expert_group_count", 8),
        ("mixtral", "llama", "expert_weights_norm", False),
        ("llama_linear", "llama", PATTERN, 2),
        ("phi3", "phi3", PATTERN, 2),
        ("olmo2", "olmo2", "rope.freq_base_swa", 99.0),
        ("gemma3", "gemma3", "rope.scaling.attn_factor", 1.5),
    ],
)
def test_keys_that_are_read_of_other_architectures_alone_are_refused_by_name(tmp_path, name, architecture, key, value):
    convert(name, tmp_path / "m.gguf", architecture, others={f"{architecture}.{key}": value})
    with pytest.raises(
        ModelError, match=re.escape(f"not understood and could change the model's output; got {architecture}.{key} ")
    ):
        read_config(tmp_path / "m.gguf")


def test_factors_of_the_rotation_count_in_every_architecture(tmp_path):
    convert("llama_gqa", tmp_path / "m.gguf", "llama", others={"llama.rope.scaling.attn_factor": 1.5})
    assert read_config(tmp_path / "m.gguf").rope.attention_factor == 1.5
    convert("qwen3", tmp_path / "m.gguf", "qwen3", others={"qwen3.rope.scale_linear": 4.0})
    rope = read_config(tmp_path / "m.gguf").rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)
    convert("olmo3", tmp_path / "m.gguf", "olmo2", others={"olmo2.rope.freq_base_swa": 99.0})
    near = read_config(tmp_path / "m.gguf").kinds[0].rope
    assert near is not None
    assert (near.theta, near.scaling) == (99.0, "none")


def test_rotary_factors_that_fit_nothing_are_refused(tmp_path):
    convert("llama_llama3", tmp_path / "m.gguf", "llama", llama__rope__scaling__type="linear")
    with pytest.raises(ModelError, match="8 factors, 16 dimensions that turn, scaling linear"):
        read_config(tmp_path / "m.gguf")
