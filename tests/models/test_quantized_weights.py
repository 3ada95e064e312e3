"""Weights that stay quantised: the numbers of `gguf`'s own dequantisation, and the model's logits with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.checkpoint import PackedRows, Packing, common
from jinfercept.models.gguf_weights import PACKINGS
from jinfercept.models.in_memory import Replacement, initial_params, shapes_of
from jinfercept.models.joined_weights import join_layer, joinable, separate
from jinfercept.models.load import bytes_to_load, load
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model
from jinfercept.models.quantized import QuantizedTensor, is_quantized
from tests.support.dense_model import dense, logits
from tests.support.quantized_weight import pack
from tests.support.tiny_gguf import E, F, write
from tests.support.tiny_model import set_joined

V = 64
TOKENS = jnp.arange(3, 15)


TYPES = {
    "attn_q.weight": "Q4_0",  # its rows are permuted
    "attn_k.weight": "Q4_K",
    "attn_v.weight": "Q5_0",
    "attn_output.weight": "Q5_1",
    "ffn_gate.weight": "Q8_0",
    "ffn_up.weight": "Q4_1",
    "ffn_down.weight": "Q5_K",
}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random blocks overflow
def test_quantised_weights_are_the_numbers_that_gguf_dequantises(tmp_path):
    assert {*TYPES.values(), "Q6_K", "MXFP4"} == PACKINGS.keys()  # the last one is of experts
    write(tmp_path / "m.gguf", kind="Q6_K", vocab_size=V, layers=(TYPES,))
    for dtype in ("float32", "bfloat16"):
        exact = load(tmp_path / "m.gguf", dtype=dtype, quantization="none").params
        kept = load(tmp_path / "m.gguf", dtype=dtype, quantization="gguf").params
        matrices = {name for name, weight in kept.layers[0].items() if is_quantized(weight)}
        assert matrices == {"q", "k", "v", "o", "gate", "up", "down"}
        assert is_quantized(kept.embed["embedding"])
        assert is_quantized(kept.head["unembed"])
        kept, exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), (dense(kept), exact))
        jax.tree.map(np.testing.assert_array_equal, kept, exact)


def test_a_model_of_quantised_weights_has_the_logits_of_their_numbers(tmp_path):
    write(tmp_path / "m.gguf", kind="Q4_1", vocab_size=V, layers=({}, {}))
    exact = load(tmp_path / "m.gguf", dtype="float32", quantization="none")
    kept = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    expected = logits(exact.model, exact.params, TOKENS)
    np.testing.assert_allclose(logits(kept.model, kept.params, TOKENS), expected, atol=1e-4)
    again = initial_params(kept.model, kept.params, ModelMesh.default())
    np.testing.assert_allclose(logits(kept.model, again, TOKENS), expected, atol=1e-4)


def test_quantised_weights_are_joined_and_come_apart_again(tmp_path):
    write(tmp_path / "m.gguf", kind="Q4_1", vocab_size=V)
    loaded = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    apart = loaded.params
    joined = apart._replace(layers=tuple(map(join_layer, apart.layers)))
    assert is_quantized(joined.layers[0]["qkv"])
    assert joined.layers[0]["gate_up"].shape == (2, E, F)
    exact = dense(joined).layers[0]
    for name, weight in join_layer(dense(apart).layers[0]).items():
        np.testing.assert_array_equal(exact[name], weight)
    model = Model(loaded.model.config, joined=True)
    np.testing.assert_allclose(logits(model, joined, TOKENS), logits(loaded.model, apart, TOKENS), atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, separate(joined), apart)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_types_that_differ_between_layers_are_stored_alike_and_exactly(tmp_path):
    layers = ({"ffn_down.weight": "Q6_K", "attn_v.weight": "F16"}, {"ffn_gate.weight": "Q8_0"})
    write(tmp_path / "m.gguf", kind="Q5_1", vocab_size=V, layers=layers)
    with np.errstate(all="ignore"):
        exact = load(tmp_path / "m.gguf", dtype="float32", quantization="none").params
        kept = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf").params
    first, second = kept.layers
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert first["down"].packing == second["down"].packing == Packing("int8", 16, "float32", offset=True)
    assert first["gate"].packing == Packing("int8", 32, "float16", offset=True)
    assert not is_quantized(first["v"]), "F16 in the first layer"
    assert not joinable(first), "q and v are not alike"
    assert joinable(first | {"v": first["k"]})
    jax.tree.map(np.testing.assert_array_equal, dense(kept), exact)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_read_in_pieces_are_those_read_whole(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", kind="Q4_K", vocab_size=V)
    whole = load(tmp_path / "m.gguf", quantization="gguf").params
    monkeypatch.setattr("jinfercept.models.load.PIECE_BYTES", (1, 1))
    pieces = load(tmp_path / "m.gguf", quantization="gguf").params
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)


def test_a_matrix_that_does_not_fill_blocks_is_dequantised(tmp_path):
    write(tmp_path / "m.gguf", kind="Q4_0", vocab_size=50, without=("output.weight",))
    loaded = load(tmp_path / "m.gguf", dtype="bfloat16", quantization="gguf")
    assert loaded.params.embed["embedding"].dtype == "bfloat16"
    assert is_quantized(loaded.params.layers[0]["q"])


def test_the_memory_of_quantised_weights_is_known_before_they_are_loaded(tmp_path):
    write(tmp_path / "m.gguf", kind="Q4_1", vocab_size=V, without=("output.weight",))
    loaded = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    arrays = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(loaded.params)}
    assert bytes_to_load(tmp_path / "m.gguf", "float32", quantization="gguf") == sum(arrays.values())
    wide = bytes_to_load(tmp_path / "m.gguf", "float32", quantization="none")
    assert wide > 6 * sum(arrays.values())


def test_what_cannot_be_done_with_quantised_weights_is_refused(tmp_path):
    write(tmp_path / "m.gguf", kind="Q4_1", vocab_size=V)
    with pytest.raises(
        ModelError, match="quantization differs from how the weights are stored; got gptq, weights of gguf"
    ):
        load(tmp_path / "m.gguf", quantization="gptq")
    loaded = load(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    with pytest.raises(ModelError, match="cannot be replaced"):
        Replacement(loaded.model, loaded.params, shapes_of(loaded.params))
    with pytest.raises(ConfigError, match="cut between blocks of 32 outputs"):
        bytes_to_load(tmp_path / "m.gguf", "float32", 4, quantization="gguf")  # 16 rows of the vocabulary
    assert bytes_to_load(tmp_path / "m.gguf", "float32", 2, quantization="gguf")


@given(st.integers(1, 3), st.sampled_from([0, 8]), st.booleans(), st.integers(0, 1 << 16))
def test_rows_of_4_bits_are_stored_in_the_order_of_the_products(num_groups, zero, offset, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 16, (32, 32 * num_groups), np.uint8)
    scales = rng.standard_normal((32, num_groups)).astype(np.float16)
    offsets = rng.standard_normal((32, num_groups)).astype(np.float16) if offset else None
    rows = PackedRows.of_4_bits(numbers, scales, offsets)
    packed = pack(jnp.asarray(numbers.T), jnp.asarray(scales.T), bits=4)
    np.testing.assert_array_equal(rows.values.T, packed.values[0])
    packing = Packing("uint32", 32, offset=offset, zero=zero)
    wide = rows.stored_as(packing, common({packing, Packing("int8", 16, "float32")}))
    np.testing.assert_array_equal(wide.dense(0), rows.dense(zero))


@given(st.sampled_from([(1, (64, 2, 32)), (1, (64, 3, 4, 16)), (2, (2, 32, 96)), (0, (32, 64))]))
def test_a_quantised_tensor_has_the_shape_of_the_array_that_it_stands_for(sizes):
    num_inputs, shape = sizes
    for packing in PACKINGS.values():
        assert QuantizedTensor.of_shape(shape, num_inputs, packing, "float32").shape == shape
        assert QuantizedTensor.of_shape(shape, num_inputs, packing, "float32").packing == packing
