"""Random weights, for measuring and testing without a checkpoint. The output of a model with them is meaningless."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.models.config import ModelConfig
from jinfercept.models.joined_weights import serve_layer
from jinfercept.models.mesh import ModelMesh, place
from jinfercept.models.model import Model, abstract_params, tied, untied
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.sharding import fit, partition_spec


def random_params(config: ModelConfig, dtype: DTypeLike, seed: int, mesh: ModelMesh | None = None) -> Params:
    """Random weights, made on the devices, JAX's default one if `mesh` is None; any number of them gets the same for a seed."""
    mesh = mesh or ModelMesh.default()
    shapes = untied(config, abstract_params(config, dtype, joined=False))
    served = Model(config).on_devices(mesh.size).config
    cut = untied(config, abstract_params(served, dtype, joined=False, num_devices=mesh.size))
    embed_key, head_key, *layer_keys = jax.random.split(jax.random.key(seed), 2 + config.num_layers)

    def maker(block: Weights, cut_block: Weights) -> Callable[[jax.Array], Weights]:
        return partial(_placed, jax.jit(partial(_random_block, block, config.hidden_size**-0.5)), cut_block, mesh)

    embed, head = maker(shapes.embed, cut.embed), maker(shapes.head, cut.head)
    by_kind = {config.kind(i): maker(shapes.layers[i], cut.layers[i]) for i in range(config.num_layers)}
    layers = tuple(serve_layer(by_kind[config.kind(i)](key)) for i, key in enumerate(layer_keys))
    return tied(config, Params(embed(embed_key), layers, head(head_key)))


def _placed(make: Callable[[jax.Array], Weights], cut_block: Weights, mesh: ModelMesh, key: jax.Array) -> Weights:
    # made on one device and cut from there, so that only one block at a time is whole
    weights = make(key)
    if mesh.size == 1:
        return weights
    return jax.block_until_ready(
        {
            name: place(fit(name, weight, cut_block[name].shape), mesh.sharding(partition_spec(name)))
            for name, weight in weights.items()
        }
    )


def _random_block(shapes: Weights, scale: float, key: jax.Array) -> Weights:
    # one draw for all: each costs seconds of compiling
    draws = jax.random.uniform(key, (sum(leaf.size for leaf in shapes.values()),), minval=-1, maxval=1)
    weights, start = {}, 0
    for name, leaf in shapes.items():
        if leaf.ndim == 1 or name.endswith(("bias", "norm")):
            weights[name] = jnp.full(leaf.shape, 0 if name.endswith("bias") else 1, leaf.dtype)
        else:
            drawn = draws[start : start + leaf.size].reshape(leaf.shape)
            weights[name] = (drawn * scale * 3**0.5).astype(leaf.dtype)  # of deviation `scale`
        start += leaf.size
    return weights
