"""Queries and keys as their product leaves them, inside Triton kernels: norm and rotation, as the models compute them."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jinfercept.pallas.tiles import power_of_two
from jinfercept.pallas.triton_softmax import LOG2_E, LOWEST


def load_turned(
    qkv_ref,  # [T, K, G + 2, D]
    cos_ref,  # [T, half]
    sin_ref,  # [T, half]
    token: Int[Array, ""],
    where: tuple[Int[Array, ""], Int[Array, "*rows"] | int],
    mask: Bool[Array, "*rows"],
    norm_ref,  # [D], or None
    *,
    interleaved: bool,
    eps: float | None,
) -> Float[Array, "*any Dp"]:
    """Heads of one token, normed and rotated, in their own type; zeros in the padding and where the mask is false. `where` is a
    KV head, and the places of heads beside it."""
    head_dim, half = qkv_ref.shape[3], cos_ref.shape[1]
    column = jnp.arange(power_of_two(head_dim))
    column = column[None, :] if jnp.ndim(where[1]) else column  # for rows of heads, or for one
    first = column % 2 == 0 if interleaved else column < half
    step = 1 if interleaved else half
    turning = column < 2 * half
    # every dimension is loaded beside the other one of its pair, since a block's columns cannot change places
    partner = jnp.where(turning, jnp.where(first, column + step, column - step), column)
    pair = jnp.where(turning, column // 2 if interleaved else column % half, 0)
    cos = plgpu.load(cos_ref.at[token, pair], mask=turning, other=1.0)
    sin = plgpu.load(sin_ref.at[token, pair], mask=turning, other=0.0)
    inside = mask & (column < head_dim)
    mine, beside = (
        plgpu.load(qkv_ref.at[token, *where, columns], mask=inside, other=0.0).astype(jnp.float32)
        for columns in (column, partner)
    )
    if norm_ref is not None:
        assert eps is not None
        mean = jnp.sum(mine * mine, axis=-1, keepdims=True) / head_dim
        factor = jax.lax.rsqrt(mean + eps)
        mine, beside = (
            _scaled(numbers * factor, plgpu.load(norm_ref.at[columns], mask=column < head_dim, other=0.0))
            for numbers, columns in ((mine, column), (beside, partner))
        )
    return (mine * cos + beside * jnp.where(first, -sin, sin)).astype(qkv_ref.dtype)


def own_token_carry(
    queries: Float[Array, "rows Dp"],
    key: Float[Array, "Dp"],
    value: Float[Array, "Dp"],
    head_dim: int,
    is_there: Bool[Array, ""],
):
    """The carry of an online softmax over one token alone, or over none; see `triton_softmax.empty_carry`."""
    products = queries.astype(jnp.float32) * key.astype(jnp.float32)[None, :]
    top = jnp.sum(products, axis=1) * (head_dim**-0.5 * LOG2_E)
    there = jnp.broadcast_to(is_there, top.shape)
    return (
        jnp.where(there, top, LOWEST),
        jnp.where(there, 1.0, 0.0),
        (jnp.zeros(queries.shape) + value.astype(jnp.float32)[None, :],),
    )


def _scaled(normed: Float[Array, "*any Dp"], scale: Float[Array, "*one Dp"]) -> Float[Array, "*any Dp"]:
    # rounded where the models round
    rounded = normed.astype(scale.dtype).astype(jnp.float32) * scale.astype(jnp.float32)
    return rounded.astype(scale.dtype).astype(jnp.float32)
