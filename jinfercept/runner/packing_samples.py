"""Packs for the device, and unpacks there: a plan's sampled rows, one int32 matrix in the step's upload; and the sampling state
of a slot, an int32 vector in an upload of its own."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.pallas.layouts.pages import Scalar
from jinfercept.runner.sampling import IN_PROMPT, NOTHING, Kind, SampleRows, Slots, mask_words
from jinfercept.sampling_params import MAX_BAD_SEQUENCES, MAX_BAD_TOKENS, MAX_BIASED_TOKENS
from jinfercept.sched.plan import Chunk, DrawOptions, Sample, TokenHistory

_RECENT = MAX_BAD_TOKENS - 1
NUM_FIELDS = len(SampleRows._fields)
_FIRST_FLOAT = SampleRows._fields.index("temperature")
_ONE = np.ones(1, np.float32).view(np.int32)[0]
_LEAST = np.finfo(np.float32).tiny
_REMEMBERED, _TOP_K, _TOP_P, _REPETITION = map(SampleRows._fields.index, ("remembered", "top_k", "top_p", "repetition"))


class SampledRow(NamedTuple):
    """One draw of a plan."""

    token_index: int  # of the token whose logits it draws from, counted over all chunks
    slot: int | None  # None where the chunk has drafts
    position: int  # of the token to be drawn, in its sequence
    sample: Sample


def pack_samples(drawn: Sequence[SampledRow], num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "fields R"]:
    """Pack sampled rows. Rows of a chunk with drafts write to no slot, since the host sends the next token."""
    rows = _blank(num_rows, scratch_slot)
    if drawn:
        count = len(drawn)
        indices, slots, positions, samples = zip(*drawn, strict=True)
        temperatures, keys, options, ends_forbidden, _, _ = zip(*samples, strict=True)
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
        num_tokens, sample = len(chunk.tokens), chunk.sample
        end += num_tokens
        if sample is None:
            continue
        position = chunk.start + num_tokens
        if not chunk.num_drafts:
            rows.append(SampledRow(end - 1, chunk.slot, position, sample))
            continue
        rows += [
            SampledRow(end - 1 - behind, None, position - behind, sample) for behind in range(chunk.num_drafts, -1, -1)
        ]
    return rows


def pack_positions(token_indices: Sequence[int], num_rows: int, scratch_slot: int) -> Int32[np.ndarray, "fields R"]:
    """Pack rows of which only the logits are computed."""
    rows = _blank(num_rows, scratch_slot)
    rows[0, : len(token_indices)] = token_indices
    return rows


def draw_needs(drawn: Sequence[SampledRow]) -> tuple[Kind, bool]:
    """The simplest kind of draw that serves all rows, and whether any row reads the state of its slot."""
    options = [row.sample.options for row in drawn if row.sample.options]
    remembered = bool([each for each in options if each.remembered])
    if not [row for row in drawn if row.sample.temperature]:
        return "greedy", remembered
    return "filtered" if [each for each in options if each.filtered] else "drawn", remembered


def unpack_samples(packed: Int[Array, "fields R"]) -> SampleRows:
    floats = jax.lax.bitcast_convert_type(packed[_FIRST_FLOAT:], jnp.float32)
    return SampleRows(*packed[:_FIRST_FLOAT], *floats)


def pack_slot(options: DrawOptions, history: TokenHistory, vocab_size: int) -> Int32[np.ndarray, "slot"]:
    """Pack the sampling state of a sequence that gets a slot."""
    params = options.params
    vector = np.zeros(slot_size(vocab_size), np.int32)
    parts = _split_slot(vector, vocab_size)
    _count(parts, history)
    allowed, ends = np.zeros(vocab_size, bool), np.zeros(vocab_size, bool)
    allowed[list(params.allowed_token_ids) if params.allowed_token_ids else slice(None)] = True
    bad = params.bad_words_token_ids or ()
    allowed[[ids[0] for ids in bad if len(ids) == 1]] = False
    ends[[token for token in options.end_token_ids if 0 <= token < vocab_size]] = True
    parts.allowed[:], parts.ends[:] = _words(allowed), _words(ends)
    biases = params.logit_bias or {}
    parts.biased[:] = vocab_size
    parts.biased[: len(biases)] = list(biases)
    parts.bias[: len(biases)] = np.fromiter(biases.values(), np.float32, len(biases)).view(np.int32)
    parts.bad[:] = NOTHING
    parts.bad[:, -1] = vocab_size
    for sequence, ids in zip(parts.bad, (ids for ids in bad if len(ids) > 1), strict=False):
        sequence[-len(ids) :] = ids
    return vector


def unpack_slot(slots: Slots, slot: Scalar, packed: Int[Array, "slot"]) -> Slots:
    """Replace the state of one slot by a packed one."""
    parts = _split_slot(packed, slots.counts.shape[1])
    return Slots(
        *(
            whole.at[slot].set(jax.lax.bitcast_convert_type(part, whole.dtype))
            for whole, part in zip(slots, parts, strict=True)
        )
    )


def slot_shapes(num_slots: int, vocab_size: int) -> Slots:
    """Shapes and types of the slots' state, the scratch slot included."""

    def struct(dtype: Any, *dims: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots + 1, *dims), dtype)

    words = mask_words(vocab_size)
    return Slots(
        recent=struct(jnp.int32, _RECENT),
        counts=struct(jnp.int32, vocab_size),
        allowed=struct(jnp.uint32, words),
        ends=struct(jnp.uint32, words),
        biased=struct(jnp.int32, MAX_BIASED_TOKENS),
        bias=struct(jnp.float32, MAX_BIASED_TOKENS),
        bad=struct(jnp.int32, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS),
    )


def slot_size(vocab_size: int) -> int:
    """Length of a packed slot."""
    return sum(leaf.size for leaf in slot_shapes(0, vocab_size))


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


def _count(parts: Any, history: TokenHistory) -> None:
    tokens = np.array(history.tokens, np.int32)
    generated = np.ones(len(tokens), bool)
    for start, end in history.external_spans:
        generated[start:end] = False
    parts.counts[:] = np.bincount(tokens[generated], minlength=len(parts.counts))
    parts.counts[tokens[~generated]] |= IN_PROMPT
    recent = np.where(generated, tokens, NOTHING)[-_RECENT:]
    parts.recent[:] = NOTHING
    parts.recent[_RECENT - len(recent) :] = recent


def _words(allowed: np.ndarray) -> Int32[np.ndarray, "words"]:
    padded = np.zeros(32 * mask_words(len(allowed)), bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _split_slot(vector: Any, vocab_size: int) -> Any:
    shapes = slot_shapes(0, vocab_size)
    ends = accumulate(leaf.size for leaf in shapes)
    return Slots(
        *(vector[end - leaf.size : end].reshape(leaf.shape[1:]) for end, leaf in zip(ends, shapes, strict=True))
    )
