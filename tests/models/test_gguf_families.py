"""Golden checkpoints rewritten as llama.cpp's converter writes their families give the logits that transformers gives."""

import json
import math
from pathlib import Path

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
    ("mlp.", "ffn_"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)


def convert(name: str, file: Path, architecture: str, **strings: str) -> None:
    """A golden checkpoint as a GGUF file in float32."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = {}
    for part in sorted((GOLDEN / name).glob("*.safetensors")):
        tensors |= load_file(part)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    for tensor, stored in tensors.items():
        values = stored.astype(np.float32)
        if architecture == "llama" and ("q_proj" in tensor or "k_proj" in tensor):
            values = pairs_side_by_side(values, config["head_dim"])
        for old, new in RENAMED:
            tensor = tensor.replace(old, new)
        writer.add_tensor(tensor, values)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config["rope_parameters"], config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pairs_side_by_side(rows: np.ndarray, head_dim: int) -> np.ndarray:
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


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
    [("llama_llama3", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_float32_logits_are_those_of_transformers(tmp_path, name, architecture):
    convert(name, tmp_path / "m.gguf", architecture)
    loaded, golden = load(tmp_path / "m.gguf", dtype="float32"), np.load(GOLDEN / f"{name}.npz")
    ours = logits(loaded.model, loaded.params, golden["tokens_0"])
    np.testing.assert_allclose(ours, golden["logits_0"], atol=1e-4, rtol=0)


def test_rotary_factors_that_fit_nothing_are_refused(tmp_path):
    convert("llama_llama3", tmp_path / "m.gguf", "llama", llama__rope__scaling__type="linear")
    with pytest.raises(ModelError, match="8 factors, head size 16, scaling linear"):
        read_config(tmp_path / "m.gguf")
