"""Packs a plan's chunks into one int32 vector, so that a step needs one upload, and unpacks it inside the executable."""

from itertools import chain
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.pallas.layout import OUT_OF_RANGE, Batch
from jinfercept.sched.plan import FROM_DEVICE, Chunk


class PackedShape(NamedTuple):
    """The static sizes of one bucket's executable."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_row: int  # P


def enter(chunks: tuple[Chunk, ...], tables: Int32[np.ndarray, "slots P"]) -> None:
    """Write the chunks' new pages into the page tables."""
    for chunk in chunks:
        for index, page in chunk.new_pages:
            tables[chunk.slot, index] = page


def pack(
    chunks: tuple[Chunk, ...], tables: Int32[np.ndarray, "slots P"], page_size: int, shape: PackedShape
) -> Int32[np.ndarray, "packed"]:
    """The packed batch of a plan.

    Args:
        chunks: at most `num_rows`, of at most `num_tokens` tokens together; those of one token come first.
        tables: device slots of every sequence slot's pages.
    """
    num_tokens, num_rows, _ = shape
    vector = np.zeros(_size(shape), np.int32)
    tokens, positions, write_index, token_slots, query_starts, context_lens, page_tables, num_decode = _split(
        vector, shape
    )
    write_index[:] = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + num_tokens, dtype=np.int32)
    if not chunks:
        return vector
    slots, starts, lists, *_ = zip(*chunks, strict=True)
    rows = len(chunks)
    assert rows <= num_rows
    slots, starts = np.fromiter(slots, np.int32, rows), np.fromiter(starts, np.int32, rows)
    lengths = np.fromiter(map(len, lists), np.int32, rows)
    query_starts[1 : rows + 1] = lengths.cumsum()
    used = int(query_starts[rows])
    assert used <= num_tokens
    query_starts[rows + 1 :] = used
    context_lens[:rows] = starts + lengths
    tables.take(slots, axis=0, out=page_tables[:rows], mode="clip")
    num_decode[0] = np.count_nonzero(lengths == 1)
    tokens[:used] = np.fromiter(chain.from_iterable(lists), np.int32, used)
    token_slots[:used] = slots.repeat(lengths)
    positions[:used] = (starts - query_starts[:rows]).repeat(lengths) + np.arange(used, dtype=np.int32)
    page, offset = np.divmod(positions[:used], page_size)
    write_index[:used] = tables[token_slots[:used], page] * page_size + offset
    return vector


def unpack(packed: Int[Array, "packed"], last_tokens: Int[Array, "slots"], shape: PackedShape) -> Batch:
    """The batch on the device, with `FROM_DEVICE` replaced by the slots' last tokens."""
    tokens, positions, write_index, token_slots, query_starts, context_lens, page_tables, num_decode = _split(
        packed, shape
    )
    tokens = jnp.where(tokens == FROM_DEVICE, last_tokens[token_slots], tokens)
    return Batch(tokens, positions, write_index, query_starts, context_lens, page_tables, num_decode[0])


def _size(shape: PackedShape) -> int:
    num_tokens, num_rows, pages_per_row = shape
    return 4 * num_tokens + (num_rows + 1) + num_rows + num_rows * pages_per_row + 1


def _split(vector, shape: PackedShape):
    num_tokens, num_rows, pages_per_row = shape
    sizes = (num_tokens,) * 4 + (num_rows + 1, num_rows, num_rows * pages_per_row, 1)
    parts, first = [], 0
    for size in sizes:
        parts.append(vector[first : first + size])
        first += size
    parts[6] = parts[6].reshape(num_rows, pages_per_row)
    return parts
