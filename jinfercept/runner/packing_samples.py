"""Packs a plan's sampled rows into one int32 matrix, for the step's upload, and unpacks it on the device."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.runner.logits_processors import SampleRows
from jinfercept.sched.plan import Chunk, Sample
from jinfercept.sched.sampling_options import DrawOptions

NUM_FIELDS = len(SampleRows._fields)
_FIRST_FLOAT = SampleRows._fields.index("temperature")
_ONE = np.ones(1, np.float32).view(np.int32)[0]
_LEAST = np.finfo(np.float32).tiny
_REMEMBERED, _TOP_K, _TOP_P, _REPETITION = map(SampleRows._fields.index, ("remembered", "top_k", "top_p", "repetition"))

Kind = Literal["greedy", "drawn", "filtered"]
"""What a step's draw computes: the largest logits; draws by temperature too; the filters `top_k`, `top_p`, `min_p` too."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class SampledRow(NamedTuple):
    """One draw of a plan.

    Attributes:
        token_index: the token whose logits it draws from, counted over the chunks.
        slot: of the sequence; None where the chunk has drafts.
        sample: how the token is drawn.
    """

    token_index: int
    slot: int | None
    sample: Sample


def pack_samples(drawn: Sequence[SampledRow], num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "fields R"]:
    """The parameters of sampled rows. Rows of a chunk with drafts write to no slot: the host sends its next token."""
    rows = _blank(num_rows, scratch_slot)
    if drawn:
        count = len(drawn)
        indices, slots, samples = zip(*drawn, strict=True)
        temperatures, keys, positions, options, ends_forbidden, _, _ = zip(*samples, strict=True)
        rows[0, :count] = indices
        rows[1, :count] = [scratch_slot if slot is None else slot for slot in slots]
        halves = np.fromiter(keys, "<u8", count).view("<i4")
        rows[2, :count], rows[3, :count] = halves[1::2], halves[::2]
        rows[4, :count] = positions
        rows[_FIRST_FLOAT, :count] = np.fromiter(temperatures, np.float32, count).view(np.int32)
        if any(options):
            for row, draw_options in enumerate(options):
                if draw_options is not None:
                    _enter_options(rows[:, row], draw_options, ends_forbidden[row])
    return rows


def sampled_rows(chunks: tuple[Chunk, ...]) -> list[SampledRow]:
    """The sampled rows of a plan, in its order."""
    rows: list[SampledRow] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.tokens)
        if chunk.sample is None:
            continue
        if not chunk.num_drafts:
            rows.append(SampledRow(end - 1, chunk.slot, chunk.sample))
            continue
        for row in range(1 + chunk.num_drafts):
            sample = chunk.sample._replace(position=chunk.sample.position + row)
            rows.append(SampledRow(end - 1 - chunk.num_drafts + row, None, sample))
    return rows


def pack_positions(token_indices: Sequence[int], num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "fields R"]:
    """Rows whose logits are computed and from which no token is drawn."""
    rows = _blank(num_rows, scratch_slot)
    rows[0, : len(token_indices)] = token_indices
    return rows


def draw_kind(drawn: Sequence[SampledRow]) -> Kind:
    """The simplest kind of draw that computes all that the rows ask for."""
    if not any(row.sample.temperature for row in drawn):
        return "greedy"
    return "filtered" if [row for row in drawn if row.sample.options and row.sample.options.filtered] else "drawn"


def any_remembered(drawn: Sequence[SampledRow]) -> bool:
    """Whether the state of a row's slot applies."""
    return bool([row for row in drawn if row.sample.options and row.sample.options.remembered])


def unpack_samples(packed: Int[Array, "fields R"]) -> SampleRows:
    """The sampled rows on the device."""
    floats = jax.lax.bitcast_convert_type(packed[_FIRST_FLOAT:], jnp.float32)
    return SampleRows(*packed[:_FIRST_FLOAT], *floats)


def _blank(num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "fields R"]:
    rows = np.zeros((NUM_FIELDS, num_rows), np.int32)
    rows[1] = scratch_slot
    rows[_TOP_P] = rows[_REPETITION] = _ONE
    return rows


def _enter_options(row: Int32[np.ndarray, "fields"], options: DrawOptions, ends_forbidden: bool) -> None:
    params = options.params
    row[_REMEMBERED:_FIRST_FLOAT] = options.remembered, ends_forbidden, min(max(0, params.top_k), 2**31 - 1)
    numbers = (
        *(params.top_p or _LEAST, params.min_p),  # all tokens reach a share of 0, and none would be kept
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
    )
    row[_TOP_P:] = np.array(numbers, np.float32).view(np.int32)
