"""How a page stores a token's key or value of one head: as D numbers, or as D bytes and their scale.

A quantised row is `[D + 4]` bytes: the numbers in int8 or in fp8 (e4m3), then the row's scale, a float32 number, by bytes.
Pages of int8 hold int8, pages of uint8 hold fp8: raw bits, which no backend rewrites. Every row has a scale of its own, since
tokens enter a page one after the other: a scale for a whole page would change with later tokens, and what is stored would
depend on how tokens were cut into steps. Rows are whole 32-bit words, so that a GPU writes and moves pages as words.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

SCALE_BYTES = 4
STORED = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.uint8)}
"""The type of the page arrays by the name of the quantised format."""
LARGEST = {"int8": 127.0, "uint8": 448.0}
"""The largest number of a quantised row by the type of its page array: a row's largest value is scaled to it."""


def stored_dtype(kv_cache_dtype: str, dtype: DTypeLike) -> jnp.dtype:
    """The type of page arrays: of the format with this name, or for `auto` the model's `dtype`."""
    return jnp.dtype(dtype) if kv_cache_dtype == "auto" else STORED[kv_cache_dtype]


def is_quantised(stored: DTypeLike) -> bool:
    """Whether page arrays of this type hold quantised rows."""
    return jnp.dtype(stored) in STORED.values()


def row_width(head_dim: int, stored: DTypeLike) -> int:
    """Numbers of a row in page arrays of this type. Raises `ValueError` if a quantised row would not be whole words."""
    if not is_quantised(stored):
        return head_dim
    if head_dim % 4:
        raise ValueError(f"quantised pages need whole words; got head dim {head_dim}; fix: use kv_cache_dtype auto")
    return head_dim + SCALE_BYTES


def quantised(x: Float[Array, "... D"], stored: DTypeLike) -> Num[Array, "... W"]:
    """Rows as page arrays of this type store them. A row depends on nothing but its own numbers.

    A number differs from what was stored by at most 1/254 of its row's largest one in int8; in fp8 by at most 1/16 of itself,
    or 1/458,752 of the row's largest one where that is more.
    """
    x, stored = x.astype(jnp.float32), jnp.dtype(stored)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST[stored.name]
    scaled = x / jnp.where(scale == 0.0, 1.0, scale)
    if stored == STORED["int8"]:
        numbers = jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)
    else:
        numbers = jax.lax.bitcast_convert_type(
            jnp.clip(scaled, -LARGEST["uint8"], LARGEST["uint8"]).astype(jnp.float8_e4m3fn), jnp.uint8
        )
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(scale[..., 0], stored)], axis=-1)


def widened(numbers: Num[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Quantised numbers as `dtype`, not scaled: all are exact in bfloat16 and wider. Kernels use it too.

    The bits of e4m3 shifted into a float16 number are 1/256 of it, subnormal ones included; not every GPU has e4m3.
    """
    if numbers.dtype == jnp.int8:
        return numbers.astype(dtype)
    bits = numbers.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((bits & 0x7F) << 7 | (bits & 0x80) << 8, jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(dtype)


def split_row(rows: Num[Array, "... W"], dtype: DTypeLike) -> tuple[Float[Array, "... D"], Float[Array, "..."] | None]:
    """Stored rows as numbers of `dtype`, and their scales; None if the rows are not quantised."""
    if not is_quantised(rows.dtype):
        return rows.astype(dtype), None
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return widened(numbers, dtype), jax.lax.bitcast_convert_type(scale, jnp.float32)


def dequantised(rows: Num[Array, "... W"]) -> Float[Array, "... D"]:
    """Stored rows as float32."""
    numbers, scale = split_row(rows, jnp.float32)
    return numbers if scale is None else numbers * scale[..., None]
