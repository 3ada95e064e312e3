"""Checkpoints in float8: their weights against their definition, with scales of every kind."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfercept.errors import ModelError
from jinfercept.models.load import load, quantization_of
from jinfercept.models.quantized import is_quantized
from tests.models.test_gptq_weights import CONFIG, LINEAR, E, V
from tests.support.dense_model import dense

COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
KINDS = {
    "a tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "outputs": COMPRESSED,
    "blocks": {"quant_method": "fp8", "weight_block_size": [16, 32]},
}


def scaled_layer(rng: np.random.Generator, inputs: int, outputs: int, kind: str) -> tuple[dict, np.ndarray]:
    """Random numbers of a linear layer and their scales, and its weight."""
    numbers = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    shape = {"a tensor": (1,), "outputs": (outputs, 1), "blocks": (outputs // 16, inputs // 32)}[kind]
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    every = scales if kind != "blocks" else np.repeat(np.repeat(scales, 16, axis=0), 32, axis=1)
    name = "weight_scale_inv" if kind == "blocks" else "weight_scale"
    return {"weight": numbers, name: scales}, numbers.astype(np.float32) * every


def write_safetensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """A file with float8, which the package does not write from numpy: a header's length, the header, the numbers."""
    kinds = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": kinds[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    numbers = b"".join(tensor.tobytes() for tensor in tensors.values())
    file.write_bytes(len(described).to_bytes(8, "little") + described + numbers)


def write(directory: Path, kind: str) -> Path:
    """A random checkpoint, and the same weights unquantised in its folder `plain`."""
    rng, plain = np.random.default_rng(0), directory / "plain"
    plain.mkdir()
    shared = {"model.embed_tokens.weight": (V, E), "lm_head.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(2):
        shared |= {f"model.layers.{i}.{name}_layernorm.weight": (E,) for name in ("input", "post_attention")}
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shared.items()}
    stored = dict(weights)
    for i in range(2):
        for name, sizes in LINEAR.items():
            tensors, weights[f"model.layers.{i}.{name}.weight"] = scaled_layer(rng, *sizes, kind)
            stored |= {f"model.layers.{i}.{name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(weights, plain / "model.safetensors")
    write_safetensors(stored, directory / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG))
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": KINDS[kind]}))
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_float8_has_the_weights_that_its_definition_gives(tmp_path, kind):
    plain = write(tmp_path, kind)
    expected, kept = load(plain, dtype="float32").params, load(tmp_path, dtype="float32").params
    assert quantization_of(tmp_path) == "fp8"
    assert {str(weight.values.dtype) for weight in kept.layers[0].values() if is_quantized(weight)} == {"float8_e4m3fn"}
    jax.tree.map(np.testing.assert_array_equal, dense(kept), expected)
    dequantised = load(tmp_path, dtype="float32", quantization="none").params
    jax.tree.map(np.testing.assert_array_equal, dequantised, expected)


def test_other_compressed_tensors_are_refused(tmp_path):
    write(tmp_path, "outputs")
    changed = CONFIG | {"quantization_config": COMPRESSED | {"format": "pack-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match="compressed tensors are in float8; got 'pack-quantized'"):
        load(tmp_path)
