"""Weights of the same rows are joined when they are loaded, and apart in checkpoints."""

import jax
import numpy as np
import pytest

from jinfercept.models.joined_weights import abstract_separate_params, join, separate
from jinfercept.models.load import load
from jinfercept.models.model import abstract_params
from tests.support.tiny_model import GOLDEN


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2", "gptj"])
def test_weights_apart_are_joined_and_come_apart_again(name: str) -> None:
    loaded = load(GOLDEN / name, dtype="float32")
    apart = separate(loaded.params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), apart)
    assert shapes == abstract_separate_params(loaded.model.config, "float32")
    assert {"q", "k", "v"} <= apart.layers[0].keys()
    again = join(apart)
    assert jax.tree.structure(again) == jax.tree.structure(abstract_params(loaded.model.config, "float32"))
    jax.tree.map(np.testing.assert_array_equal, again, loaded.params)
