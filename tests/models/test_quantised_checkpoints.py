"""GPTQ, AWQ and float8 checkpoints: their numbers against the dequantisation that defines them, and a model of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import ModelError
from jinfercept.models.load import bytes_to_load, load, quantization_of
from jinfercept.models.quantized import is_quantized
from tests.support.dense_model import dense, logits
from tests.support.quantised_checkpoints import CONFIG, FUSED, KINDS, write, write_model
from tests.support.tiny_model import set_joined


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_weights_that_its_definition_gives(tmp_path, kind):
    plain = write(tmp_path, KINDS[kind])
    expected = load(plain, dtype="float32")
    kept = load(tmp_path, dtype="float32")
    name = "fp8" if kind.startswith("fp8") else KINDS[kind]["quant_method"]
    assert quantization_of(tmp_path) == name
    assert {ours for ours, weight in kept.params.layers[1].items() if is_quantized(weight)} == {
        *("q", "k", "v", "o", "gate", "up", "down")
    }
    jax.tree.map(np.testing.assert_array_equal, dense(kept.params), expected.params)
    dequantised = load(tmp_path, dtype="float32", quantization="none").params
    jax.tree.map(np.testing.assert_array_equal, dequantised, expected.params)
    assert bytes_to_load(tmp_path, "float32", quantization=name) < bytes_to_load(
        tmp_path, "float32", quantization="none"
    )


@pytest.mark.parametrize("kind", [pytest.param("gptq", marks=pytest.mark.slow), "awq"])
def test_weights_that_are_stored_as_one_are_kept_apart(tmp_path, kind):
    phi3 = CONFIG | {"architectures": ["Phi3ForCausalLM"]}
    expected = load(write_model(tmp_path, phi3, {}, FUSED, KINDS[kind]), dtype="float32")
    kept = load(tmp_path, dtype="float32")
    assert is_quantized(kept.params.layers[0]["v"])
    jax.tree.map(np.testing.assert_array_equal, dense(kept.params), expected.params)


def test_a_model_of_words_has_the_logits_of_its_weights(tmp_path):
    plain = write(tmp_path, KINDS["awq"])
    expected, kept, tokens = load(plain, dtype="float32"), load(tmp_path, dtype="float32"), jnp.arange(12)
    np.testing.assert_allclose(
        logits(kept.model, kept.params, tokens), logits(expected.model, expected.params, tokens), atol=1e-3
    )


def test_the_memory_of_words_is_known_without_the_weights(tmp_path):
    write(tmp_path, KINDS["gptq"])
    num_bytes = bytes_to_load(tmp_path, "bfloat16")
    (tmp_path / "model.safetensors").unlink()
    assert bytes_to_load(tmp_path, "bfloat16") == num_bytes


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quantisation is not supported; got 'bitsandbytes'"),
        ("gptq", {"bits": 3}, "numbers of gptq checkpoints have other sizes; got bits 3"),
        ("gptq", {"desc_act": True}, "in order of activation are not supported"),
        ("gptq", {"group_size": 12}, "group_size is a multiple of 8"),
        ("gptq", {"group_size": 16}, "another number of groups than group_size says|in order of activation"),
        ("gptq", {"sym": True}, "zeros of a symmetric checkpoint"),
        ("gptq", {"quant_method": "awq", "version": "gemv"}, "AWQ has the version gemm"),
        ("fp8, outputs", {"format": "pack-quantized"}, "compressed tensors are in float8; got 'pack-quantized'"),
    ],
)
def test_words_that_would_be_read_wrongly_are_refused(tmp_path, kind, changed, message):
    write(tmp_path, KINDS[kind], **changed)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)
