"""Random weights, for measuring and testing without a checkpoint. The output of a model with them is meaningless."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.models.config import ModelConfig
from jinfercept.models.joined_weights import serve_layer
from jinfercept.models.model import abstract_params, tied, untied
from jinfercept.models.protocol import Params, Weights


def random_params(config: ModelConfig, dtype: DTypeLike, seed: int) -> Params:
    """Random weights, made on the device; the same for the same seed."""
    shapes = untied(config, abstract_params(config, dtype, joined=False))
    embed_key, head_key, *layer_keys = jax.random.split(jax.random.key(seed), 2 + config.num_layers)
    embed, head, layer = (
        jax.jit(partial(_random_block, block, config.hidden_size**-0.5))
        for block in (shapes.embed, shapes.head, shapes.layers[0])
    )
    layers = tuple(serve_layer(layer(key)) for key in layer_keys)
    return tied(config, Params(embed(embed_key), layers, head(head_key)))


def _random_block(shapes: Weights, scale: float, key: jax.Array) -> Weights:
    """Matrices uniform with deviation `scale`, norms 1, biases 0. One draw for all: each costs seconds of compiling."""
    draws = jax.random.uniform(key, (sum(leaf.size for leaf in shapes.values()),), minval=-1, maxval=1)
    weights, start = {}, 0
    for name, leaf in shapes.items():
        if leaf.ndim == 1 or name.endswith("bias"):
            weights[name] = jnp.full(leaf.shape, 0 if name.endswith("bias") else 1, leaf.dtype)
        else:
            drawn = draws[start : start + leaf.size].reshape(leaf.shape)
            weights[name] = (drawn * scale * 3**0.5).astype(leaf.dtype)
        start += leaf.size
    return weights
