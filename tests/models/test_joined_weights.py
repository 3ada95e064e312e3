"""Weights of the same rows are joined where kernels multiply, and apart in checkpoints and where a CPU has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.models.joined_weights import join_layer, separate
from jinfercept.models.load import load
from jinfercept.models.model import Model, abstract_params
from tests.support.dense_model import logits
from tests.support.joining import set_joined
from tests.support.tiny_model import GOLDEN


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, False)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2", "qwen3", "olmo2", "phi3", "gptj"])
def test_joined_weights_give_the_same_logits_and_come_apart_again(name: str) -> None:
    loaded = load(GOLDEN / name, dtype="float32")
    config, apart = loaded.model.config, loaded.params
    assert {"q", "k", "v"} <= apart.layers[0].keys()
    joined = apart._replace(layers=tuple(map(join_layer, apart.layers)))
    assert jax.tree.structure(joined) == jax.tree.structure(abstract_params(config, "float32", joined=True))
    tokens = jnp.arange(3, 14)
    expected = logits(loaded.model, apart, tokens)
    np.testing.assert_allclose(logits(Model(config, joined=True), joined, tokens), expected, rtol=1e-4, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, separate(joined), apart)
