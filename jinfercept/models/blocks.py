"""What the model families share: the token embedding, the norms, and the one einsum that applies every weight."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.models.config import ModelConfig


@runtime_checkable
class Attend[KV](Protocol):
    """Attention over a cache, given by the caller.

    Writes `k` and `v` into the cache, lets every query attend to what it may see (scores scaled by `1 / sqrt(D)`), and
    returns the result in q's dtype with the cache.
    """

    def __call__(
        self, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], kv: KV, /
    ) -> tuple[Float[Array, "T H D"], KV]: ...


class Embed(nnx.Module):
    """Token ids to vectors."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        return self.embedding[...][tokens]


def project(
    spec: str,
    x: Float[Array, "..."],
    weight: nnx.Param[Float[Array, "..."]],
    bias: nnx.Param[Float[Array, "..."]] | None = None,
    out: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """`einsum(spec, x, weight) + bias`. float32 is multiplied as float32: the default on a GPU would be TF32."""
    y = jnp.einsum(spec, x, weight[...], precision=jax.lax.Precision.HIGHEST, preferred_element_type=out)
    return y if bias is None else y + bias[...]


def rms_norm(x: Float[Array, "... E"], scale: nnx.Param[Float[Array, "E"]], eps: float) -> Float[Array, "... E"]:
    """Root-mean-square norm of the last axis in float32, rounded to x's dtype before the scale, as the original does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale[...]


def layer_norm(
    x: Float[Array, "T E"], scale: nnx.Param[Float[Array, "E"]], bias: nnx.Param[Float[Array, "E"]], eps: float
) -> Float[Array, "T E"]:
    """Layer norm in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale[...] + bias[...]).astype(x.dtype)
