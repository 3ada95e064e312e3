"""Experts that stay quantised: the numbers of their formats' own dequantisation, and the logits with them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.joined_weights import serve
from jinfercept.models.load import DTypeName, bytes_to_load, load
from jinfercept.models.quantized import is_quantized
from tests.models.test_gguf_families import convert
from tests.support.dense_model import dense, logits
from tests.support.quantised_checkpoints import KINDS, write_model

GOLDEN = Path(__file__).parent.parent / "golden"
MXFP4 = GOLDEN / "gpt_oss_mxfp4"


def num_bytes(params: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_the_numbers_that_transformers_dequantises(dtype: DTypeName) -> None:
    golden, kept = np.load(f"{MXFP4}.npz"), load(MXFP4, dtype=dtype).params
    assert {name for name, weight in kept.layers[0].items() if is_quantized(weight)} == {
        "experts_gate_up",
        "experts_down",
    }
    for layer in (dense(kept).layers[0], load(MXFP4, dtype=dtype, quantization="none").params.layers[0]):
        gate_up = np.asarray(layer["experts_gate_up"][-1], np.float32)
        np.testing.assert_array_equal(gate_up.swapaxes(1, 2).reshape(golden["gate_up"].shape), golden["gate_up"])
        np.testing.assert_array_equal(np.asarray(layer["experts_down"][-1], np.float32), golden["down"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mlp.experts.down_proj_scales": None}, "down_proj_blocks .* scales missing"),
        ({"mlp.experts.down_proj_scales": np.zeros((6, 64, 3), np.uint8)}, r"scales \[6, 64, 3\] of uint8"),
        ({"mlp.experts.down_proj_scales": np.zeros((6, 64, 2), np.float32)}, r"scales \[6, 64, 2\] of float32"),
        ({"mlp.experts.down_proj_blocks": np.zeros((6, 64, 2, 8), np.uint8)}, r"blocks \[6, 64, 2, 8\] of uint8"),
        (
            {"mlp.experts.down_proj_blocks": np.zeros((6, 64, 3, 16), np.uint8)}
            | {"mlp.experts.down_proj_scales": np.zeros((6, 64, 3), np.uint8)},
            r"down_proj expected \[6, 64, 64\] got \[6, 96, 64\]",
        ),
    ],
)
def test_blocks_without_fitting_scales_are_refused(tmp_path: Path, changed: dict, words: str) -> None:
    shutil.copytree(MXFP4, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in changed.items():
        name = f"model.layers.1.{name}"
        tensors = {other: kept for other, kept in tensors.items() if other != name}
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load(tmp_path / "m")


def test_the_bytes_of_experts_that_are_not_there_yet_are_those_of_their_blocks(tmp_path: Path) -> None:
    config = json.loads((MXFP4 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bytes_to_load(tmp_path, "bfloat16") == bytes_to_load(MXFP4, "bfloat16")


def test_a_gguf_file_of_gpt_oss_has_the_weights_and_the_config_of_the_directory(tmp_path: Path) -> None:
    convert("gpt_oss_mxfp4", tmp_path / "m.gguf", "gpt-oss")
    stored, original = load(tmp_path / "m.gguf", dtype="float32"), load(MXFP4, dtype="float32")
    config = replace(original.model.config, eos_token_ids=())
    assert replace(stored.model.config, norm_eps=config.norm_eps) == config
    assert is_quantized(stored.params.layers[0]["experts_down"])
    jax.tree.map(np.testing.assert_array_equal, stored.params, original.params)
    exact = load(tmp_path / "m.gguf", dtype="float32", quantization="none").params
    jax.tree.map(np.testing.assert_array_equal, exact, dense(original.params))


E, F, X = 64, 64, 4
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": E,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "num_experts": X,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
ATTENTION = {"q_proj": (E, 64), "k_proj": (E, 32), "v_proj": (E, 32), "o_proj": (64, E)}
SAMPLED = ("gptq", "fp8, blocks")
"""Each family of kinds once; `test_quantised_checkpoints.py` reads weights of every kind."""


def write_qwen3_moe(directory: Path, how: dict | None) -> Path:
    """A random Qwen3-MoE, quantised but for its routers, and the same weights unquantised in its folder `plain`."""
    linear = {f"self_attn.{name}": sizes for name, sizes in ATTENTION.items()}
    for expert in range(X):
        sides = {"gate_proj": (E, F), "up_proj": (E, F), "down_proj": (F, E)}
        linear |= {f"mlp.experts.{expert}.{name}": sizes for name, sizes in sides.items()}
    others = {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,), "mlp.gate": (X, E)}
    return write_model(directory, QWEN3_MOE, others, linear, how)


@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLED else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_experts_of_safetensors_checkpoints_stay_quantised(tmp_path: Path, kind: str) -> None:
    plain = write_qwen3_moe(tmp_path / "m", KINDS[kind])
    expected, kept = load(plain, dtype="float32"), load(tmp_path / "m", dtype="float32")
    layer = kept.params.layers[0]
    assert is_quantized(layer["experts_gate_up"])
    assert is_quantized(layer["experts_down"])
    assert not is_quantized(layer["router"])
    jax.tree.map(np.testing.assert_allclose, dense(kept.params), serve(expected.params))
    tokens = np.arange(3, 40)
    ours = logits(kept.model, kept.params, tokens)
    np.testing.assert_allclose(ours, logits(expected.model, expected.params, tokens), atol=2e-3)


@pytest.mark.parametrize("kind", ["Q4_1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q8_0", "Q5_0"))])
def test_experts_of_gguf_files_stay_quantised(tmp_path: Path, kind: str) -> None:
    write_qwen3_moe(tmp_path / "m", None)
    convert(str(tmp_path / "m"), tmp_path / "m.gguf", "qwen3moe", quantised=kind)
    exact = load(tmp_path / "m.gguf", dtype="float32", quantization="none")
    kept = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    assert {name for name, weight in kept.params.layers[0].items() if is_quantized(weight)} >= {
        "experts_gate_up",
        "experts_down",
    }
    jax.tree.map(np.testing.assert_array_equal, dense(kept.params), exact.params)
    tokens = np.arange(3, 40)
    ours = logits(kept.model, kept.params, tokens)
    np.testing.assert_allclose(ours, logits(exact.model, exact.params, tokens), atol=1e-3)
    assert bytes_to_load(tmp_path / "m.gguf", "float32", quantization="gguf") == num_bytes(kept.params)
