"""First weights of the small Llama, with which it learns to copy in hundreds of steps.

As in "Mimetic Initialization of Self-Attention Layers" (arXiv 2305.09828), attention starts out as what it mostly becomes. A
head of the first layer looks at the token at one distance. Later layers look for what equals the query, and write what they
see.
"""

import jax
import jax.numpy as jnp

from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import tied, untied
from jinfercept.models.protocol import Params, Weights

SHARPNESS = 0.8
"""Of the first layer's heads: how much they prefer their distance."""
NUM_WAVES = 6
"""Fastest pairs of a head's dimensions, by which the first layer's heads find their distance."""
OUTPUT_SCALE = 0.15
"""Of what a layer adds at first, so that it does not drown the tokens themselves."""


def first_weights(config: ModelConfig, seed: int) -> Params:
    """Weights in float32, apart.

    Args:
        config: of a model with tied embeddings and as many heads for keys as for queries.
        seed: of the random part.
    """
    params = untied(config, separate(random_params(config, "float32", seed)))
    common = jax.random.normal(jax.random.key(seed), (config.hidden_size,))
    common /= jnp.linalg.norm(common)
    first, *later = params.layers
    layers = [_looking_back(first, common, config), *map(_matching, later)]
    quiet = tuple(layer | {name: layer[name] * OUTPUT_SCALE for name in ("o", "down")} for layer in layers)
    embed = params.embed | {"embedding": params.embed["embedding"] + common}
    return tied(config, params._replace(embed=embed, layers=quiet))


def _looking_back(layer: Weights, common: jax.Array, config: ModelConfig) -> Weights:
    """A layer whose head `h` looks at the token `h + 1` before. All tokens share the direction `common`."""
    half, heads = config.head_dim // 2, config.num_heads
    speeds = config.rope.theta ** (-jnp.arange(half) / half)
    angles = speeds * jnp.arange(1, heads + 1)[:, None]  # [H, D / 2]
    strength = jnp.where(jnp.arange(half) < NUM_WAVES, SHARPNESS, 0.0)
    query = jnp.concatenate([jnp.broadcast_to(strength, angles.shape), jnp.zeros_like(angles)], axis=1)
    key = jnp.concatenate([strength * jnp.cos(angles), strength * jnp.sin(angles)], axis=1)
    written = {"v": jnp.repeat(layer["v"][:, :1], heads, axis=1), "o": jnp.repeat(layer["o"][:1], heads, axis=0)}
    return (
        dict(layer)
        | written
        | {"q": layer["q"] + common[:, None, None] * query, "k": layer["k"] + common[:, None, None] * key}
    )


def _matching(layer: Weights) -> Weights:
    """A layer whose keys are like its queries, and whose heads write back what they read."""
    return dict(layer) | {"k": jnp.copy(layer["q"]), "o": jnp.moveaxis(layer["v"], 0, 2)}
