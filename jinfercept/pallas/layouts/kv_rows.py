"""How a page stores a token's key or value of one head: as D numbers of the model's type, or as D bytes and their scale.

A quantised page is an array of 32-bit words. First come the numbers of its rows, `[B, 2, K, D / 4]`, in int8 or in fp8 (e4m3),
four in a word with the lowest byte first; then the rows' scales, `[2, K, B]`, float32 numbers by their bits. Pages of int32
hold int8, pages of uint32 hold fp8. A GPU counts offsets in words, for which 32 bits suffice in any layer below 8 GiB. It
copies 16 bytes at once, since every row of numbers begins at a multiple of these.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

BYTES = 4  # numbers of a word
STORED = {"int8": jnp.dtype(jnp.int32), "fp8": jnp.dtype(jnp.uint32)}
"""The type of the page arrays by the name of the quantised format."""
LARGEST = {"int32": 127.0, "uint32": 448.0}
"""The largest number of a quantised row by the type of its page array: a row's largest value is scaled to it."""


def stored_dtype(kv_cache_dtype: str, dtype: DTypeLike) -> jnp.dtype:
    """The type of page arrays: of the format with this name, or for `auto` the model's `dtype`."""
    return jnp.dtype(dtype) if kv_cache_dtype == "auto" else STORED[kv_cache_dtype]


def is_quantised(stored: DTypeLike) -> bool:
    """Whether page arrays of this type hold quantised rows."""
    return jnp.dtype(stored) in STORED.values()


def row_width(head_dim: int, stored: DTypeLike) -> int:
    """The width W of a row in page arrays of this type: numbers, or words with the scale's. Raises `ValueError` if a quantised
    row would not be whole words."""
    if not is_quantised(stored):
        return head_dim
    if head_dim % BYTES:
        raise ValueError(f"quantised pages need whole words; got head dim {head_dim}; fix: use kv_cache_dtype auto")
    return head_dim // BYTES + 1


def quantised(x: Float[Array, "... D"], stored: DTypeLike) -> tuple[Num[Array, "... words"], Num[Array, "..."]]:
    """Rows as page arrays of this type store them: words of numbers, and the words of scales. Each depends on its row alone.

    In int8 a number's error is at most 1/254 of its row's largest number. In fp8 it is at most 1/16 of the number, or 1/458,752
    of the row's largest where that is more.
    """
    x, stored = x.astype(jnp.float32), jnp.dtype(stored)
    largest = LARGEST[stored.name]
    # A scale for each row, since tokens enter a page one after the other: a scale for a whole page would change with later
    # tokens, and what is stored would depend on how tokens were cut into steps.
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / largest
    scaled = jnp.clip(x / jnp.where(scale == 0.0, 1.0, scale), -largest, largest)
    if stored == STORED["int8"]:
        bits = jnp.round(scaled).astype(jnp.int32).astype(jnp.uint32) & 0xFF
    else:
        bits = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.uint32)
    bits = bits.reshape(*x.shape[:-1], -1, BYTES)
    words = sum(
        bits[..., place] << 8 * place for place in range(BYTES)
    )  # XLA fuses it, unlike a bitcast, into a scatter
    return tuple(jax.lax.bitcast_convert_type(part, stored) for part in (words, scale[..., 0]))  # pyright: ignore[reportReturnType]


def numbers_of(words: Num[Array, "..."], place: int) -> Num[Array, "..."]:
    """Every word's number at a place, as int8 or as the bits of e4m3, for `widened`. Kernels use it too."""
    return (words >> 8 * place).astype(jnp.int8 if words.dtype == STORED["int8"] else jnp.uint8)


def widened(numbers: Num[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Quantised numbers as `dtype`, not scaled: all are exact in bfloat16 and wider. Kernels use it too."""
    if numbers.dtype == jnp.int8:
        return numbers.astype(dtype)
    return (e4m3_shares(numbers) * 256.0).astype(dtype)


def e4m3_shares(bits: Num[Array, "..."]) -> Float[Array, "..."]:
    """1/256 of e4m3 numbers, given by their bits (uint8), in float32. Kernels use it too."""
    bits = bits.astype(jnp.uint16)
    # the bits shifted into a float16 number, subnormal ones included, since not every GPU has e4m3
    half = jax.lax.bitcast_convert_type((bits & 0x7F) << 7 | (bits & 0x80) << 8, jnp.float16)
    return half.astype(jnp.float32)


def split_pages(pages: Num[Array, "... B 2 K W"]) -> tuple[Num[Array, "... B 2 K D"], Float[Array, "... B 2 K"]]:
    """Quantised pages as numbers, for `widened`, and their rows' scales."""
    *before, page_size, _, num_kv_heads, width = pages.shape
    block = pages.reshape(*before, -1)
    rows = (page_size, 2, num_kv_heads)
    words, scales = jnp.split(block, [prod(rows) * (width - 1)], axis=-1)
    kind = jnp.int8 if pages.dtype == STORED["int8"] else jnp.uint8
    numbers = jax.lax.bitcast_convert_type(words, kind).reshape(*before, *rows, -1)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float32).reshape(*before, 2, num_kv_heads, page_size)
    return numbers, jnp.moveaxis(scales, -1, -3)


def dequantised(pages: Num[Array, "... B 2 K W"]) -> Float[Array, "... B 2 K D"]:
    """The rows of pages as float32."""
    if not is_quantised(pages.dtype):
        return pages.astype(jnp.float32)
    numbers, scales = split_pages(pages)
    return widened(numbers, jnp.float32) * scales[..., None]
