"""The arrays that attention reads: the axis order of the pages and the packed batch.

Letters, for the whole repository: `T` query tokens in the step, `S` sequences (batch rows), `P` pages per sequence, `N` pages
in the pool, `B` tokens per page, `H` query heads, `K` KV heads, `D` head dim, `E` embed, `F` ffn, `V` vocab, `L` layers, `R`
sampled rows.

One layer's pages are one array `[N, B, 2, K, W]`, with W = D numbers of a head. A token's key and value heads are one
contiguous row, so that writing a token is one row and a page is one contiguous block. Quantised pages have the same axes by
size, with W = D / 4 + 1 words; `kv_rows.py` says how these lie in a page's block. Page 0 belongs to no sequence and stays
zeros: unused entries of page tables point to it, so that attention may read them. Padding writes nowhere: its indices are
distinct and out of range. The order was chosen by measurements on a CPU; TPUs have another, `interleaved.py`.
"""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, UInt32

from jinfercept.pallas.layouts.interleaved import is_interleaved, write_interleaved
from jinfercept.pallas.layouts.kv_rows import is_quantised, quantised, row_width

SCRATCH_PAGE = 0
OUT_OF_RANGE = 2**30
"""First index of padding, in pages or in tokens: no pool has as many. Scatters drop such indices, which must be distinct."""


HeadRows = Float[Array, "T H D"]
"""A row of numbers for each query head of each token: queries, and what attention returns."""
Scalar = Int[Array, ""]
"""A whole number that only the device knows."""


class VectorPart(NamedTuple):
    """Part of an int32 vector, from number `first` on, that a kernel reads where it lies: XLA would copy a slice first."""

    vector: Int[Array, "packed"]
    first: int
    shape: tuple[int, ...]

    def array(self) -> Int[Array, "..."]:
        return self.vector[self.first : self.first + prod(self.shape)].reshape(self.shape)


type Ints = Any
"""Whole numbers that a kernel reads: an array of JAX or numpy, or a `VectorPart`."""


def as_array(ints: Ints) -> Int[Array, "..."]:
    return ints.array() if isinstance(ints, VectorPart) else jnp.asarray(ints)


class WindowBatch(NamedTuple):
    """Fields that replace those of a `Batch` for layers with pages in the pool for windows."""

    write_index: Int[Array, "T"]
    page_tables: Int[Array, "S P"]  # entries before a row's window are the scratch page
    work: Any = None


class StateSlots(NamedTuple):
    """By row, the slots of recurrent layers' states that it writes and reads, and the number of its draft tokens."""

    slots: Int[Array, "S"]
    sources: Int[Array, "S"]
    num_drafts: Int[Array, "S"]


class Batch(NamedTuple):
    """One step's queries, ragged: row `s` owns the query tokens `query_starts[s] : query_starts[s + 1]`.

    The first `num_decode` rows have one query token each (token `s` is row `s`); the chunks follow. Unused rows come last;
    their `query_starts` repeat the number of tokens in use, and their context length is 0. Padding tokens follow the last used
    one; their `write_index` counts up from `OUT_OF_RANGE`, and their position is 0.
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    write_index: Int[Array, "T"]  # where the token's KV goes: page · B + offset
    query_starts: Int[Array, "S1"]  # S + 1 entries
    context_lens: Int[Array, "S"]  # tokens visible to the row's last query, itself included
    page_tables: Int[Array, "S P"]  # unused entries are the scratch page
    num_decode: Scalar
    work: Any = None  # what kernels read, `work_schedule.Work`: the same for all layers
    states: Any = None  # `StateSlots`, where the model has recurrent layers
    adapters: Any = None  # of every token, [T], from 1 on, 0: none; where the model has room for adapters
    window: Any = None  # `WindowBatch`, where layers with a window have a pool of their own

    following: Any = (
        None  # the token behind every token, [T], where a layer drafts; `FROM_DEVICE`: it is drawn in this step
    )

    @property
    def of_windows(self) -> "Batch":
        """The batch for layers with pages in the pool for windows."""
        return self._replace(**self.window._asdict(), window=None)


KVPages = Num[Array, "N B *sides heads W"]
"""One layer's pages: `[N, B, 2, K, W]`, or `interleaved`."""
type PagesLike = KVPages | jax.ShapeDtypeStruct
"""One layer's pages, or their shape with its sharding."""


def kv_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike = jnp.float32
) -> tuple[int, int, int, int, int]:
    """The shape of one layer's `KVPages` of this type; `num_pages` counts the scratch page too."""
    return (num_pages, page_size, 2, num_kv_heads, row_width(head_dim, dtype))


def write_kv(
    pages: KVPages, key: Float[Array, "T K D"], value: Float[Array, "T K D"], write_index: Int[Array, "T"]
) -> KVPages:
    """Write every token's key and value to its place in the pages, quantised if the pages are; in place if `pages` is donated.
    `write_index` is that of a `Batch`, distinct; an index out of range writes nothing."""
    if is_interleaved(pages):
        return write_interleaved(pages, key, value, write_index)
    if is_quantised(pages.dtype):
        return _write_quantised(pages, jnp.stack([key, value], axis=1), write_index)
    key, value = key.astype(pages.dtype), value.astype(pages.dtype)
    # On a GPU as 32-bit words: XLA emits 2-byte accesses for bfloat16, and a scatter whose indices may repeat is a
    # compare-and-swap loop for every number there. A CPU would copy the whole pool for such a view.
    return jax.lax.platform_dependent(pages, key, value, write_index, cpu=_write_rows, default=_write_words)


def to_words(x: Num[Array, "N ..."]) -> UInt32[Array, "N W"]:
    """The numbers of pages or rows as 32-bit words, the first axis kept: a view on a GPU. They must fill whole words."""
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1), jnp.uint32)
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 4 // x.dtype.itemsize), jnp.uint32)


def from_words(words: UInt32[Array, "..."], like: KVPages, shape: tuple[int, ...]) -> Num[Array, "..."]:
    """Words as numbers of the type of `like`, in this shape."""
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(shape)


def _write_rows(
    pages: KVPages, key: Num[Array, "T K W"], value: Num[Array, "T K W"], write_index: Int[Array, "T"]
) -> KVPages:
    page, offset = jnp.divmod(write_index, pages.shape[1])
    rows = jnp.stack([key, value], axis=1)  # [T, 2, K, W]
    return pages.at[page, offset].set(rows, unique_indices=True, mode="drop")


def _write_words(
    pages: KVPages, key: Num[Array, "T K W"], value: Num[Array, "T K W"], write_index: Int[Array, "T"]
) -> KVPages:
    rows = jnp.concatenate([_joined(key), _joined(value)], axis=1)  # [T, words of a token]
    tokens = to_words(pages.reshape(-1, *pages.shape[2:]))
    written = tokens.at[write_index].set(rows, unique_indices=True, mode="drop")
    return from_words(written, pages, pages.shape)


def _write_quantised(pages: KVPages, rows: Float[Array, "T 2 K D"], write_index: Int[Array, "T"]) -> KVPages:
    """Words of a token are one piece of its page's block; its scales are a column behind all words."""
    num_pages, page_size, _, num_kv_heads, width = pages.shape
    words, scales = quantised(rows, pages.dtype)
    page, slot = jnp.divmod(write_index, page_size)
    token = 2 * num_kv_heads * (width - 1)
    blocks = _put(pages.reshape(num_pages, -1), words.reshape(-1, 1, token), (page, slot * token))
    columns = blocks.reshape(num_pages, -1, page_size)
    columns = _put(columns, scales.reshape(-1, 1, 2 * num_kv_heads, 1), (page, jnp.full_like(page, token), slot))
    return columns.reshape(pages.shape)


def _put(
    array: Num[Array, "..."], windows: Num[Array, "T ..."], starts: tuple[Int[Array, "T"], ...]
) -> Num[Array, "..."]:
    axes = tuple(range(array.ndim))
    numbers = jax.lax.ScatterDimensionNumbers(tuple(axis + 1 for axis in axes), (), axes)
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(array, jnp.stack(starts, axis=1), windows, numbers, unique_indices=True, mode=mode)


def _joined(x: Num[Array, "T K D"]) -> UInt32[Array, "T W"]:
    """`to_words` by arithmetic, which XLA fuses into the scatter; it writes the operand of a bitcast to memory first."""
    if x.dtype.itemsize == 4:
        return to_words(x)
    halves = jax.lax.bitcast_convert_type(x, jnp.uint16).reshape(x.shape[0], -1, 2).astype(jnp.uint32)
    return halves[..., 0] | halves[..., 1] << 16
