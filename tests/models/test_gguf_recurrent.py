"""Checkpoints of Qwen3-Next and Qwen3.5 written as llama.cpp's converter writes them have the weights of the directory."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.load import load
from jinfercept.models.quantized import is_quantized
from tests.support.dense_model import dense
from tests.support.draft_checkpoint import with_draft_layer
from tests.support.tiny_model import GOLDEN

RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "mtp.layers.0.": "blk.{behind}.",
    "mtp.pre_fc_norm_embedding": "blk.{behind}.nextn.enorm",
    "mtp.pre_fc_norm_hidden": "blk.{behind}.nextn.hnorm",
    "mtp.norm": "blk.{behind}.nextn.shared_head_norm",
    "linear_attn.in_proj_qkv.": "attn_qkv.",
    "linear_attn.in_proj_z.": "attn_gate.",
    "linear_attn.in_proj_ba.": "ssm_ba.",
    "linear_attn.in_proj_b.": "ssm_beta.",
    "linear_attn.in_proj_a.": "ssm_alpha.",
    "linear_attn.conv1d.": "ssm_conv1d.",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.": "ssm_norm.",
    "linear_attn.out_proj.": "ssm_out.",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    "mlp.gate.": "ffn_gate_inp.",
    "_proj": "",
    "mtp.fc": "blk.{behind}.nextn.eh_proj",
    **{f"mlp.shared_expert.{part}.": f"ffn_{part}_shexp." for part in ("gate", "up", "down")},
    "mlp.": "ffn_",
}
EXPERTS = "mlp.experts."


def tiled(rows: np.ndarray, keys: int, config: dict[str, Any], size: int) -> np.ndarray:
    """Rows of value heads behind `keys` others, with the first of all key heads in front."""
    heads = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    values = rows[keys:].reshape(*heads, size, *rows.shape[1:]).swapaxes(0, 1)
    return np.concatenate([rows[:keys], values.reshape(-1, *rows.shape[1:])])


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of a layer's experts in one."""
    made = {name: tensor for name, tensor in tensors.items() if EXPERTS not in name}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(EXPERTS)
        if part == "gate_up_proj":
            gate, up = np.split(tensor, 2, axis=1)
            made |= {f"{layer}mlp.gate_exps.weight": gate, f"{layer}mlp.up_exps.weight": up}
        elif part == "down_proj":
            made[f"{layer}mlp.down_exps.weight"] = tensor
        elif part.startswith("0."):
            side = part.split(".")[1].removesuffix("_proj")
            count = sum(each.startswith(f"{layer}{EXPERTS}") for each in tensors) // 3
            parts = [tensors[f"{layer}{EXPERTS}{index}.{side}_proj.weight"] for index in range(count)]
            made[f"{layer}mlp.{side}_exps.weight"] = np.stack(parts)
    return made


def converted(name: str, tensor: np.ndarray, config: dict[str, Any], *, tiles: bool) -> dict[str, np.ndarray]:
    """A tensor as the converter writes it, by transformers' names."""
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    heads, group = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    elif "conv1d" in name:
        tensor = tensor.reshape(len(tensor), -1)
    elif (name.endswith("norm.weight") and "linear_attn" not in name) or "pre_fc_norm" in name:
        tensor = tensor + 1
    if "in_proj_qkvz" in name:
        by_head = tensor.reshape(heads, -1, tensor.shape[1])
        parts = np.split(by_head, np.cumsum([key, key, group * value]), axis=1)
        *qkv, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate(qkv), name.replace("qkvz", "z"): z}
    if tiles and ("in_proj_qkv" in name or "conv1d" in name):
        tensor = tiled(tensor, 2 * heads * key, config, value)
    elif tiles and "in_proj_z" in name:
        tensor = tiled(tensor, 0, config, value)
    elif tiles and name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = tiled(tensor, 0, config, 1)
    elif tiles and name.endswith("out_proj.weight"):
        tensor = tiled(tensor.T, 0, config, value).T
    return {name: np.ascontiguousarray(tensor)}


def convert(folder: Path, file: Path, architecture: str, kinds: dict[str, str] | None = None) -> None:
    """Write a directory's model.

    Args:
        kinds: quantisations by the beginnings of tensors' names behind the layer's.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(folder / "model.safetensors").items()}
    num_drafts = int(any(name.startswith("mtp.") for name in tensors))
    count, every = config["num_hidden_layers"], config["layer_types"].index("full_attention") + 1
    assert config["layer_types"] == [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(count)
    ]
    rope, writer = config["rope_parameters"], gguf.GGUFWriter(file, architecture)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(count + num_drafts)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_uint32(f"{architecture}.full_attention_interval", every)
    if num_drafts:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", num_drafts)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config["intermediate_size"])
    if architecture != "qwen35":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    for name, tensor in stacked(tensors).items():
        for stored, values in converted(name, tensor, config, tiles=architecture != "qwen3next").items():
            for theirs, ours in RENAMED.items():
                stored = stored.replace(theirs, ours.format(behind=count))
            kind = next((kind for part, kind in (kinds or {}).items() if f".{part}" in stored), "F32")
            quantisation = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_next", "qwen3next"), ("qwen3_5", "qwen35"), ("qwen3_5_moe", "qwen35moe")]
)
@pytest.mark.parametrize("drafts", [False, True])
def test_weights_are_those_of_the_directory(tmp_path: Path, name: str, architecture: str, drafts: bool) -> None:
    folder = with_draft_layer(name, tmp_path / "model")
    convert(folder, tmp_path / "m.gguf", architecture)
    stored, loaded = (load(path, dtype="float32", draft_layer=drafts) for path in (folder, tmp_path / "m.gguf"))
    assert stored.model.config == loaded.model.config
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), loaded.params, stored.params)


def test_weights_of_several_types_stay_quantised(tmp_path: Path) -> None:
    """Value heads of 32 columns fill whole blocks; queries, keys and values have more bits than their gates."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    folder.mkdir()
    config = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    config |= {"linear_value_head_dim": 32, "linear_key_head_dim": 32, "num_hidden_layers": 2}
    config["layer_types"] = config["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(config))
    golden = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    sizes = {
        "in_proj_qkv": (2 * 64 + 192, 32),
        "in_proj_z": (192, 32),
        "conv1d": (2 * 64 + 192, 1, 4),
        "out_proj": (32, 192),
    }
    tensors = {name: tensor.astype(np.float32) for name, tensor in golden.items() if ".layers.2." not in name}
    for part, size in (sizes | {"linear_attn.norm": (32,)}).items():
        tensors[f"model.layers.0.{'' if '.' in part else 'linear_attn.'}{part}.weight"] = rng.standard_normal(
            size, np.float32
        )
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "m.gguf", "qwen35", {"attn_qkv": "Q8_0", "attn_gate": "Q4_0", "ssm_out": "Q4_1"})
    kept, exact = (load(tmp_path / "m.gguf", dtype="float32", quantization=how).params for how in ("gguf", "none"))
    assert {name for name, weight in kept.layers[0].items() if is_quantized(weight)} == {"delta_qkvz", "delta_o"}
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), dense(kept), exact)
    near = load(folder, dtype="float32").params.layers[0]
    for name in ("delta_qkvz", "delta_o"):
        np.testing.assert_allclose(exact.layers[0][name], near[name], atol=0.4)


def test_a_file_without_the_layer_that_drafts_says_what_is_missing(tmp_path: Path) -> None:
    convert(GOLDEN / "qwen3_5", tmp_path / "m.gguf", "qwen35")
    with pytest.raises(ModelError, match=r"blk\.3\.nextn\.eh_proj\.weight expected"):
        load(tmp_path / "m.gguf", draft_layer=True)
