"""GGUF files: a tiny one written by the `gguf` package, in every supported quantisation, whole and in pieces."""

import jax
import numpy as np
import pytest

from jinfercept.errors import ModelError
from jinfercept.models import embedded, gguf_weights
from jinfercept.models.config import RopeConfig
from jinfercept.models.joined_weights import separate_layer
from jinfercept.models.load import load
from tests.support.tiny_gguf import D, E, F, H, K, V, write


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random blocks overflow
@pytest.mark.parametrize("kind", gguf_weights._TYPES)
def test_weights_are_what_gguf_dequantises_with_rotary_rows_put_back(tmp_path, kind):
    stored = write(tmp_path / "m.gguf", kind=kind)
    loaded = load(tmp_path / "m.gguf", dtype="float32", quantization="none")
    layer = separate_layer(loaded.params.layers[0])

    np.testing.assert_array_equal(loaded.params.embed["embedding"], stored["token_embd.weight"])
    np.testing.assert_array_equal(loaded.params.head["unembed"], stored["output.weight"])
    np.testing.assert_array_equal(layer["v"].reshape(E, K * D), stored["blk.0.attn_v.weight"].T)
    np.testing.assert_array_equal(layer["o"].reshape(H * D, E), stored["blk.0.attn_output.weight"].T)
    np.testing.assert_array_equal(layer["down"], stored["blk.0.ffn_down.weight"].T)
    for ours, name in (("q", "attn_q"), ("k", "attn_k")):
        rows = np.asarray(layer[ours]).reshape(E, -1).T
        np.testing.assert_array_equal(_as_llama_cpp_permutes(rows, rows.shape[0] // D), stored[f"blk.0.{name}.weight"])


def _as_llama_cpp_permutes(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["F16", "Q6_K"])
def test_weights_read_in_pieces_are_those_read_whole(tmp_path, kind, monkeypatch):
    write(tmp_path / "m.gguf", kind=kind)
    whole = load(tmp_path / "m.gguf", dtype="float32", quantization="none").params
    monkeypatch.setattr("jinfercept.models.load.PIECE_BYTES", (1, 1))  # one head at a time
    pieces = load(tmp_path / "m.gguf", dtype="float32", quantization="none").params
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), whole, pieces))


def test_the_config_comes_from_the_metadata(tmp_path):
    write(tmp_path / "m.gguf")
    config = load(tmp_path / "m.gguf", load_format="dummy").model.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (E, H, K, D)
    assert (config.vocab_size, config.ffn_size, config.max_position, config.norm_eps) == (V, F, 256, 1e-5)
    assert config.rope == RopeConfig(theta=5000.0, rotary_dim=D)
    assert config.eos_token_ids == (2, 3)
    assert not config.tie_embeddings


def test_the_embedded_model_is_loaded_by_its_name(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    monkeypatch.setattr(embedded, "fetch", lambda: tmp_path / "m.gguf")
    loaded = load("smollm2-135m")
    assert loaded.source == tmp_path / "m.gguf"


def test_without_an_output_matrix_the_embeddings_are_tied(tmp_path):
    write(tmp_path / "m.gguf", without=("output.weight",))
    loaded = load(tmp_path / "m.gguf", dtype="bfloat16")
    assert loaded.model.config.tie_embeddings
    assert loaded.params.head["unembed"] is loaded.params.embed["embedding"]


def test_what_would_run_wrongly_is_refused_by_name(tmp_path):
    file = tmp_path / "m.gguf"
    write(file, architecture="gemma")
    with pytest.raises(ModelError, match="gemma"):
        load(file)
    write(file, kind="NVFP4")
    with pytest.raises(ModelError, match="NVFP4"):
        load(file)
    write(file, extra={"llama.rope.scaling.type": "dynamic"})
    with pytest.raises(ModelError, match="dynamic"):
        load(file)
    write(file, without=("llama.block_count", "llama.context_length"))
    with pytest.raises(ModelError, match=r"no llama.block_count, llama.context_length"):
        load(file)
    write(file, without=("blk.0.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight expected \[512, 256\] got nothing"):
        load(file)
