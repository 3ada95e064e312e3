"""Rotary position embedding in float32, with the scalings of Llama's long-context variants."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jinfercept.models.config import RopeConfig
from jinfercept.pallas.layouts.scoring import Rotation


def rotate(x: Float[Array, "T H D"], positions: Int[Array, "T"], rope: RopeConfig) -> Float[Array, "T H D"]:
    """Turn the first `rotary_dim` dimensions of every head by its token's position; float32 inside, x's dtype out."""
    cos, sin = _waves(positions, rope)
    turning, rest = x[..., : rope.rotary_dim].astype(jnp.float32), x[..., rope.rotary_dim :]
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = jnp.stack(turned, axis=-1).reshape(turning.shape) if rope.interleaved else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1)


def grown(q: Float[Array, "T H D"], positions: Int[Array, "T"], rope: RopeConfig) -> Float[Array, "T H D"]:
    """Queries, longer the further behind the model's original context they are (`RopeConfig.query_growth`)."""
    if not rope.query_growth:
        return q
    times = jnp.floor_divide(positions, rope.original_max_position).astype(jnp.float32)
    return q * (1.0 + rope.query_growth * jnp.log1p(times)).astype(q.dtype)[:, None, None]


def rotation(positions: Int[Array, "T"], rope: RopeConfig) -> Rotation:
    """The rotation of `rotate`, for attention that rotates itself."""
    cos, sin = (wave[:, 0] for wave in _waves(positions, rope))
    return Rotation(cos, sin, rope.interleaved)


def _waves(positions: Int[Array, "T"], rope: RopeConfig) -> tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]:
    angles = positions[:, None, None].astype(jnp.float32) * frequencies(rope)[None, None]  # [T, 1, rotary_dim / 2]
    return jax.lax.platform_dependent(
        jnp.cos(angles) * rope.attention_factor,
        jnp.sin(angles) * rope.attention_factor,
        cpu=lambda *waves: jax.lax.optimization_barrier(waves),  # or XLA works them out again for every head
        default=lambda *waves: waves,
    )


def frequencies(rope: RopeConfig) -> Float[np.ndarray, "half"]:
    """Radians per token of each of the `rotary_dim / 2` pairs, float32."""
    base = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    match rope.scaling:
        case "none":
            scaled = base
        case "linear":
            scaled = base / rope.factor
        case "llama3":
            scaled = _llama3(base, rope)
        case "yarn":
            scaled = _yarn(base, rope)
        case "factors":
            scaled = base / np.array(rope.factors)
        case "proportional":
            scaled = np.where(np.arange(len(base)) < rope.turning_pairs, base / rope.factor, 0.0)
    return scaled.astype(np.float32)


def _llama3(base: Shaped[np.ndarray, "half"], rope: RopeConfig) -> Shaped[np.ndarray, "half"]:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    turns = rope.original_max_position * base / (2 * math.pi)  # over the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(base, rope.factor, np.clip(smooth, 0, 1))


def _yarn(base: Shaped[np.ndarray, "half"], rope: RopeConfig) -> Shaped[np.ndarray, "half"]:
    """YaRN (arXiv 2309.00071), section 3.2: a linear ramp over the pairs' indices between two numbers of turns."""

    def pair_with(turns: float) -> float:
        context_ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(context_ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (np.arange(rope.rotary_dim // 2) - low) / (high - low or 1e-3)
    return _blend(base, rope.factor, 1 - np.clip(ramp, 0, 1))


def _blend(
    base: Shaped[np.ndarray, "half"], factor: float, base_share: Shaped[np.ndarray, "half"]
) -> Shaped[np.ndarray, "half"]:
    return base * base_share + base / factor * (1 - base_share)
