"""Experts that stay quantised: the numbers of their formats' own dequantisation, and the logits with them."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.load import DTypeName, bytes_to_load, load, quantization_of
from jinfercept.models.quantized import is_quantized
from tests.support.dense_model import dense

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


def test_experts_in_mxfp4_take_17_bits_for_4_numbers() -> None:
    kept = load(MXFP4, dtype="bfloat16").params
    experts = [kept.layers[0][name] for name in ("experts_gate_up", "experts_down")]
    assert num_bytes(experts) * 8 == 6 * 3 * 64 * 64 * 17 / 4
    assert (quantization_of(MXFP4), bytes_to_load(MXFP4, "bfloat16")) == ("mxfp4", num_bytes(kept))


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
