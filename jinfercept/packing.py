"""A plan's chunks as one int32 vector, so that a step needs one upload; and back, inside the executable."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.pallas.layout import SCRATCH_PAGE, Batch
from jinfercept.sched.plan import FROM_DEVICE, Chunk


class Shape(NamedTuple):
    """The static sizes of one bucket's executable."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_row: int  # P


def pack(
    chunks: tuple[Chunk, ...], tables: Int32[np.ndarray, "slots P"], page_size: int, shape: Shape
) -> Int32[np.ndarray, "packed"]:
    """The batch of a plan. Chunks of one token come first.

    Args:
        chunks: at most `num_rows`, of at most `num_tokens` tokens together.
        tables: device slots of every sequence slot's pages.
    """
    num_tokens, num_rows, _ = shape
    vector = np.zeros(_size(shape), np.int32)
    tokens, positions, write_index, token_slots, query_starts, context_lens, page_tables, num_decode = _split(
        vector, shape
    )
    used = 0
    for row, chunk in enumerate(chunks):
        end = used + len(chunk.tokens)
        tokens[used:end] = chunk.tokens
        positions[used:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        token_slots[used:end] = chunk.slot
        page_tables[row] = tables[chunk.slot]
        query_starts[row + 1 :] = end
        context_lens[row] = chunk.start + len(chunk.tokens)
        num_decode += len(chunk.tokens) == 1
        write_index[used:end] = page_tables[row, positions[used:end] // page_size] * page_size
        used = end
    write_index[:used] += positions[:used] % page_size
    write_index[used:] = SCRATCH_PAGE * page_size
    assert used <= num_tokens
    assert len(chunks) <= num_rows
    return vector


def unpack(packed: Int[Array, "packed"], last_tokens: Int[Array, "slots"], shape: Shape) -> Batch:
    """The batch on the device, with the tokens that only the device knows filled in."""
    tokens, positions, write_index, token_slots, query_starts, context_lens, page_tables, num_decode = _split(
        packed, shape
    )
    tokens = jnp.where(tokens == FROM_DEVICE, last_tokens[token_slots], tokens)
    return Batch(tokens, positions, write_index, query_starts, context_lens, page_tables, num_decode[0])


class SampleRows(NamedTuple):
    """What is sampled: `R` rows, of which the unused ones write to the scratch slot, the last."""

    token_index: Int[Array, "R"]
    slot: Int[Array, "R"]
    seed: Int[Array, "R"]
    position: Int[Array, "R"]
    temperature: Int[Array, "R"]  # the bits of a float32


def pack_samples(chunks: tuple[Chunk, ...], num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "5 R"]:
    """The sampled rows of a plan, in its order."""
    rows = np.zeros((5, num_rows), np.int32)
    rows[1] = scratch_slot
    used, row = 0, 0
    for chunk in chunks:
        used += len(chunk.tokens)
        if chunk.sample is not None:
            temperature, seed, position = chunk.sample
            bits = np.float32(temperature).view(np.int32)
            rows[:, row] = (used - 1, chunk.slot, np.uint32(seed).view(np.int32), position, bits)
            row += 1
    return rows


def unpack_samples(packed: Int[Array, "5 R"]) -> SampleRows:
    """The sampled rows on the device."""
    return SampleRows(*packed)


def _size(shape: Shape) -> int:
    num_tokens, num_rows, pages_per_row = shape
    return 4 * num_tokens + (num_rows + 1) + num_rows + num_rows * pages_per_row + 1


def _split(vector, shape: Shape):
    num_tokens, num_rows, pages_per_row = shape
    sizes = (num_tokens,) * 4 + (num_rows + 1, num_rows, num_rows * pages_per_row, 1)
    parts, first = [], 0
    for size in sizes:
        parts.append(vector[first : first + size])
        first += size
    parts[6] = parts[6].reshape(num_rows, pages_per_row)
    return parts
