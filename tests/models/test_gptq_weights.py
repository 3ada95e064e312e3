"""GPTQ and AWQ checkpoints: their words against the dequantisation that defines them, and a model of them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfercept.errors import ModelError
from jinfercept.models.load import bytes_to_load, load, quantization_of
from jinfercept.models.quantized import is_quantized
from tests.support.dense_model import dense, logits
from tests.support.joining import set_joined

E, H, K, D, F, V, GROUP = 64, 4, 2, 16, 96, 64, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LINEAR = {
    "self_attn.q_proj": (E, H * D),
    "self_attn.k_proj": (E, K * D),
    "self_attn.v_proj": (E, K * D),
    "self_attn.o_proj": (H * D, E),
    "mlp.gate_proj": (E, F),
    "mlp.up_proj": (E, F),
    "mlp.down_proj": (F, E),
}
FUSED = {
    "self_attn.qkv_proj": (E, (H + 2 * K) * D),
    "self_attn.o_proj": (H * D, E),
    "mlp.gate_up_proj": (E, 2 * F),
    "mlp.down_proj": (F, E),
}
"""The linear layers of Phi-3."""
KINDS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq, symmetric": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq, second version, 8 bits": {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": -1,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, False)


def quantised_layer(rng: np.random.Generator, inputs: int, outputs: int, how: dict) -> tuple[dict, np.ndarray]:
    """Random words of a linear layer, and its weight `[out, in]` by the definition: scale * (number - zero)."""
    bits, most = how["bits"], 1 << how["bits"]
    group = inputs if how["group_size"] == -1 else how["group_size"]
    numbers, zeros = rng.integers(0, most, (inputs, outputs)), rng.integers(0, most, (inputs // group, outputs))
    if how.get("sym"):
        zeros[:] = most // 2
    scales = (rng.uniform(0.5, 1.5, zeros.shape) / most / 4).astype(np.float16)
    weight = (numbers - np.repeat(zeros, group, axis=0)).astype(np.float32) * np.repeat(scales, group, axis=0)
    if how["quant_method"] == "awq":
        tensors = {
            "qweight": columns_in_words(numbers, bits, awq=True),
            "qzeros": columns_in_words(zeros, bits, awq=True),
        }
    else:
        less = 0 if how.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": columns_in_words(numbers.T, bits).T.copy()}
        tensors |= {"qzeros": columns_in_words((zeros - less) % most, bits)}
        tensors |= {"g_idx": (np.arange(inputs) // group).astype(np.int32)}
    return tensors | {"scales": scales}, weight.T.copy()


def columns_in_words(numbers: np.ndarray, bits: int, *, awq: bool = False) -> np.ndarray:
    """Neighbours of a row in words of 32 bits, one after the other."""
    words = np.zeros((len(numbers), numbers.shape[1] * bits // 32), np.uint32)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if awq else range(32 // bits)
    for column in range(words.shape[1]):
        for place, which in enumerate(order):
            words[:, column] |= numbers[:, column * 32 // bits + which].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def write(directory: Path, how: dict, **changed: object) -> Path:
    """A random checkpoint, and the same weights unquantised in its folder `plain`."""
    rng, plain = np.random.default_rng(0), directory / "plain"
    plain.mkdir(exist_ok=True)
    shared = {"model.embed_tokens.weight": (V, E), "lm_head.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(2):
        shared |= {f"model.layers.{i}.{name}_layernorm.weight": (E,) for name in ("input", "post_attention")}
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shared.items()}
    words = dict(weights)
    for i in range(2):
        for name, sizes in LINEAR.items():
            tensors, weight = quantised_layer(rng, *sizes, how)
            weights[f"model.layers.{i}.{name}.weight"] = weight
            words |= {f"model.layers.{i}.{name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(weights, plain / "model.safetensors")
    save_file(words, directory / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG))
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": how | changed}))
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_weights_that_its_definition_gives(tmp_path, kind):
    plain = write(tmp_path, KINDS[kind])
    expected = load(plain, dtype="float32")
    kept = load(tmp_path, dtype="float32")
    name = KINDS[kind]["quant_method"]
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
def test_weights_that_are_stored_as_one_are_kept_apart(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(globals(), "LINEAR", FUSED)
    monkeypatch.setitem(CONFIG, "architectures", ["Phi3ForCausalLM"])
    expected = load(write(tmp_path, KINDS[kind]), dtype="float32")
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
    ("changed", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation is not supported; got 'bitsandbytes'"),
        ({"bits": 3}, "numbers of gptq checkpoints have other sizes; got bits 3"),
        ({"desc_act": True}, "in order of activation are not supported"),
        ({"group_size": 12}, "group_size is a multiple of 8"),
        ({"group_size": 16}, "another number of groups than group_size says|in order of activation"),
        ({"sym": True}, "zeros of a symmetric checkpoint"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ has the version gemm"),
    ],
)
def test_words_that_would_be_read_wrongly_are_refused(tmp_path, changed, message):
    write(tmp_path, KINDS["gptq"], **changed)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)
