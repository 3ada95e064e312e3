"""Rows of a product that a kernel may compute while it reads their operands."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

type Activation = Literal["silu", "gelu_new", "relu2"]
"""`gelu_new` is GELU by its approximation with a tangent, `relu2` the square of ReLU, of networks without gates."""

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@partial(jax.tree_util.register_dataclass, data_fields=["gate_up"], meta_fields=[])
@dataclass(frozen=True)
class Gated:
    """Rows `silu(gate) * up`; each row of `gate_up` has its gates, then its ups."""

    gate_up: Float[Array, "T 2 K"]


@partial(jax.tree_util.register_dataclass, data_fields=["x", "scale"], meta_fields=["eps"])
@dataclass(frozen=True)
class Normed:
    """Root-mean-square norm of the rows `x`; `scale` is by column, `eps` is added to the mean of the squares."""

    x: Float[Array, "T K"]
    scale: Float[Array, "K"]
    eps: float


type Rows = Float[Array, "T columns"] | Gated | Normed


def dense(rows: Rows) -> Float[Array, "T K"]:
    match rows:
        case Gated(both):
            return gated(both[:, 0], both[:, 1])
        case Normed(x, scale, eps):
            return rms_normed(x, scale, eps)
        case _:
            return rows


def gated(
    gate: Float[Array, "T K"], up: Float[Array, "T K"] | None = None, activation: Activation = "silu"
) -> Float[Array, "T K"]:
    """`act(gate) * up`, or `act(gate)` alone, computed in float32."""
    wide = _ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (wide if up is None else wide * up.astype(jnp.float32)).astype(gate.dtype)


def rms_normed(x: Float[Array, "... K"], scale: Float[Array, "K"], eps: float) -> Float[Array, "... K"]:
    """Root-mean-square norm of the last axis in float32, rounded to x's dtype before the scale, as the original does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


def precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Of products of such numbers: float32 is not rounded on the way; None: the platform's own."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rounded(x: Float[Array, "T K"], group: int) -> Float[Array, "T K"]:
    """Round each group of neighbours to whole multiples, at most 127, of a common scale; in float32."""
    groups = x.astype(jnp.float32).reshape(len(x), -1, group)
    most = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    numbers = jnp.round(groups * jnp.where(most > 0, 127.0 / most, 0.0))
    return (numbers * (most / 127.0)).reshape(x.shape)
