"""Experts whose gates lie apart from their ups, as on TPUs, on a CPU: the same layers, and weights that go back and forth."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.suite.models import SMALL_LLAMA
from jinfercept.layouts.expert_sides import ExpertSides
from jinfercept.models import joined_weights, model
from jinfercept.models.config import ExpertsConfig, ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.experts import ExpertWeights, choose, combined
from jinfercept.models.joined_weights import is_joined, separate_layer, serve_layer
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model, abstract_params, param_bytes
from jinfercept.models.protocol import Params
from jinfercept.models.sharding import partition_specs
from jinfercept.weights.in_memory import Replacement, initial_params, shapes_of

EXPERTS = ExpertsConfig(num_experts=6, per_token=2, ffn_size=20, normalised=True)


@pytest.fixture
def on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if JAX's default backend was a TPU, as far as weights are concerned."""
    for module in (model, joined_weights):
        for name in ("joins", "parts_experts"):
            monkeypatch.setattr(module, name, lambda: True)


def config(columns: int) -> ModelConfig:
    """A model of sizes of its own: what is compiled as if for a TPU is used by no other test."""
    return replace(SMALL_LLAMA, hidden_size=72, experts=EXPERTS, ffn_size=columns)


@pytest.mark.parametrize("swiglu", [None, (7.0, 1.7)])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_with_sides_apart_give_the_same_rows(swiglu: tuple[float, float] | None, biased: bool):
    experts = replace(EXPERTS, swiglu=swiglu)
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    x, gate_up, down, router = drawn(9, 8), drawn(6, 8, 2, 20), drawn(6, 20, 8), drawn(8, 6)
    biases = (drawn(6, 2, 20), drawn(6, 8)) if biased else (None, None)

    @jax.jit
    def fed(stack):
        choices = choose(jnp.dot(x, router, precision="highest"), experts)
        return combined(x, choices, ExpertWeights(stack, down, *biases), experts)

    np.testing.assert_allclose(fed(ExpertSides.of(gate_up)), fed(gate_up), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_tpus")
def test_weights_are_served_apart_and_come_back_as_they_were():
    own = config(40)
    params = random_params(own, "float32", 0)
    layer = params.layers[0]
    assert isinstance(layer["experts_gate_up"], ExpertSides)
    assert is_joined(layer)
    assert serve_layer(layer) is layer
    shapes = abstract_params(own, "float32")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [leaf.shape for leaf in jax.tree.leaves(params)]
    assert param_bytes(own, "float32") == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, serve_layer(separate_layer(layer)), layer)
    specs = partition_specs(params).layers[0]
    assert tuple(specs["experts_gate_up"]) == specs["experts_down"][:1]


@pytest.mark.usefixtures("on_tpus")
def test_other_weights_of_a_checkpoints_shapes_replace_them():
    own = Model(config(48))
    first, second = (random_params(own.config, "float32", seed) for seed in (0, 1))
    expected = jax.tree.map(np.asarray, second)
    apart = Params(second.embed, tuple(map(separate_layer, second.layers)), second.head)
    served = initial_params(own, first, ModelMesh.default())
    written = Replacement(own, apart, shapes_of(served)).write([served.embed, *served.layers, served.head])
    jax.tree.map(np.testing.assert_array_equal, written, expected)
