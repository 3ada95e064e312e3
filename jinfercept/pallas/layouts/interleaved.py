"""Pages of TPUs, as jax's attention reads them: `[N, B, 2K, D]`; a token's row has each head's key and then its value.

Rows fill the tiles of a TPU's memory: D is a multiple of 128, and there are enough heads. Other models have columns and heads
of zeros beside theirs, on every device by itself. An array of pages has this layout if it has three axes before D, and that of
`pages.py` if it has four. In both, KV heads are the last axis but one.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

INTERLEAVED_ON = ("tpu",)
"""Platforms, by JAX's names, whose pages lie so."""
FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""The type of such pages in fp8. Their rows have no scales, which jax's attention does not read; larger numbers become 448."""
LARGEST_FP8 = 448.0
LANES = 128
SUBLANES = 8


def is_interleaved(pages: Num[Array, "..."]) -> bool:
    return pages.ndim == 4


def padded_heads(num_kv_heads: int, dtype: DTypeLike) -> int:
    """KV heads of a device's pages, with those of zeros."""
    words = jnp.dtype(dtype).itemsize * 2 * num_kv_heads / 4  # of a token's column, 32 bits each
    power = next((size for size in (1, 2, 4, SUBLANES) if size >= words), None)
    rows = -(-words // SUBLANES) * SUBLANES if power is None else power
    return int(rows * 4 // jnp.dtype(dtype).itemsize // 2)


def padded_dim(head_dim: int) -> int:
    """Columns of a key or a value in the pages."""
    return -(-head_dim // LANES) * LANES


def interleaved_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, num_devices: int = 1
) -> tuple[int, int, int, int]:
    """The shape of one layer's pages. `num_pages` counts the scratch page; `num_kv_heads` are those of all devices together."""
    heads = num_devices * padded_heads(num_kv_heads // num_devices, dtype)
    return num_pages, page_size, 2 * heads, padded_dim(head_dim)


def write_interleaved(
    pages: Num[Array, "N B K2 D2"],
    key: Float[Array, "T K D"],
    value: Float[Array, "T K D"],
    write_index: Int[Array, "T"],
) -> Num[Array, "N B K2 D2"]:
    rows = jnp.stack([key, value], axis=2)  # [T, K, 2, D]
    rows = jnp.clip(rows, -LARGEST_FP8, LARGEST_FP8) if pages.dtype == FP8 else rows
    rows = rows.astype(pages.dtype)
    num_tokens, num_kv_heads, _, head_dim = rows.shape
    missing = pages.shape[2] // 2 - num_kv_heads, pages.shape[3] - head_dim
    rows = jnp.pad(rows, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else rows
    tokens = pages.reshape(-1, *pages.shape[2:])
    rows = rows.reshape(num_tokens, *tokens.shape[1:])
    return tokens.at[write_index].set(rows, unique_indices=True, mode="drop").reshape(pages.shape)


def with_padded_heads(
    q: Float[Array, "T H D"], num_kv_heads: int, pages: Num[Array, "..."]
) -> Float[Array, "T heads D"]:
    """Queries for attention over these pages. Heads of zeros have queries of zeros, behind the others."""
    if not is_interleaved(pages) or 2 * num_kv_heads == pages.shape[2]:
        return q
    group = q.shape[1] // num_kv_heads
    return jnp.pad(q, ((0, 0), (0, group * (pages.shape[2] // 2 - num_kv_heads)), (0, 0)))


def apart(pages: Num[Array, "*pages B K2 D"]) -> Num[Array, "*pages B 2 K D"]:
    """Keys and values in the layout of `pages.py`, with the zeros beside them."""
    *before, rows, width = pages.shape
    return jnp.moveaxis(pages.reshape(*before, rows // 2, 2, width), -2, -3)
