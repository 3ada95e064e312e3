"""Logits processors: masks, biases and penalties before a draw, and the state by sequence slot that they read.

The logits of a row without options pass unchanged, bit by bit, whatever the options of other rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

NOTHING = -1
"""In a bad sequence, a place that every token matches; in a slot's recent tokens, a place that no token matches."""
IN_PROMPT = 1 << 30
"""Added to the count of a token that occurs in the slot's prompt or in a result of its calls."""


class SampleRows(NamedTuple):
    """Sampling parameters of `R` rows, see `SamplingParams`. Unused rows write to the scratch slot, which is the last one."""

    token_index: Int[Array, "R"]  # of the step's tokens, whose logits they are
    slot: Int[Array, "R"]
    key_high: Int[Array, "R"]  # of the 64 bits of the request's random key
    key_low: Int[Array, "R"]
    position: Int[Array, "R"]  # of the token to be drawn, in its sequence
    remembered: Int[Array, "R"]  # 1: the state of its slot applies
    ends_forbidden: Int[Array, "R"]  # 1: end tokens are forbidden
    top_k: Int[Array, "R"]  # 0: all
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    repetition: Float[Array, "R"]
    presence: Float[Array, "R"]
    frequency: Float[Array, "R"]


class Slots(NamedTuple):
    """Sampling state of the sequences with options, by slot; that of the others is not valid.

    The number `V` marks an unused place in `biased` and at the end of a bad sequence.
    """

    recent: Int32[Array, "slots recent"]  # the tokens generated last, the newest at the end
    counts: Int32[Array, "slots V"]  # how often a token was generated, plus `IN_PROMPT`
    allowed: UInt32[Array, "slots words"]
    ends: UInt32[Array, "slots words"]
    biased: Int32[Array, "slots biased"]
    bias: Float32[Array, "slots biased"]
    bad: Int32[Array, "slots bad recent_and_one"]  # the last token may not follow the ones before it


def mask_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary: bit `v % 32` of word `v // 32` is for token `v`."""
    return -(-vocab_size // 32)


def unpack_mask(words: UInt32[Array, "R words"], vocab_size: int) -> Bool[Array, "R V"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] != 0


def shape_logits(
    logits: Float[Array, "R V"], mask: UInt32[Array, "R words"], slots: Slots, rows: SampleRows
) -> Float[Array, "R V"]:
    """Add biases and penalties to the logits, and put -inf in place of forbidden tokens. A row without a mask has all bits."""
    remembered = rows.remembered != 0
    biased = _penalize(_bias(logits, slots, rows, remembered), slots, rows, remembered)
    return jnp.where(_allowed(mask, slots, rows, remembered, logits.shape[-1]), biased, -jnp.inf)


def remember(slots: Slots, tokens: Int[Array, "R"], rows: SampleRows) -> Slots:
    """Add one more token to the slots of each remembered row."""
    places = distinct(jnp.where(rows.remembered != 0, rows.slot, len(slots.recent)), len(slots.recent))
    recent = jnp.concatenate([slots.recent[rows.slot, 1:], tokens[:, None]], axis=1)
    return slots._replace(
        recent=slots.recent.at[places].set(recent, mode="drop", unique_indices=True),
        counts=slots.counts.at[places, tokens].add(1, mode="drop", unique_indices=True),
    )


def distinct(places: Int[Array, "*R n"], end: int) -> Int[Array, "*R n"]:
    """Make places from `end` on distinct, as those below are already; nothing is written to places from `end` on."""
    # XLA writes to distinct places with plain stores; otherwise a GPU runs one compare-and-swap loop for every number.
    return jnp.where(places < end, places, end + jnp.arange(places.shape[-1], dtype=places.dtype))


def _bias(
    logits: Float[Array, "R V"], slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"]
) -> Float[Array, "R V"]:
    vocab_size = logits.shape[-1]
    places = distinct(jnp.where(remembered[:, None], slots.biased[rows.slot], vocab_size), vocab_size)
    none, bias = jnp.zeros_like(logits), slots.bias[rows.slot]
    biases = none.at[jnp.arange(len(logits))[:, None], places].set(bias, mode="drop", unique_indices=True)
    biases = jax.lax.optimization_barrier(biases)  # or XLA copies every step's logits, to change them in place
    return logits + biases


def _penalize(
    logits: Float[Array, "R V"], slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"]
) -> Float[Array, "R V"]:
    counts = jnp.where(remembered[:, None], slots.counts[rows.slot], 0)
    generated = counts & (IN_PROMPT - 1)
    repetition = jnp.where(counts != 0, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency[:, None] * generated.astype(jnp.float32)
    return logits - jnp.where(generated != 0, rows.presence[:, None], 0.0)


def _allowed(
    mask: UInt32[Array, "R words"], slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"], vocab_size: int
) -> Bool[Array, "R V"]:
    everything = jnp.uint32(0xFFFFFFFF)
    both = mask & jnp.where(remembered[:, None], slots.allowed[rows.slot], everything)
    # The mask always holds. If no token is left, bad words and end tokens are allowed; if still none is left, all tokens of the
    # mask.
    words = jnp.where(jnp.any(both != 0, axis=1, keepdims=True), both, mask)
    hard = unpack_mask(words, vocab_size)
    ends = jnp.where((remembered & (rows.ends_forbidden != 0))[:, None], slots.ends[rows.slot], 0)
    soft = unpack_mask(words & ~ends, vocab_size) & ~_bad(slots, rows, remembered, vocab_size)
    return jnp.where(jnp.any(soft, axis=1, keepdims=True), soft, hard)


def _bad(slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"], vocab_size: int) -> Bool[Array, "R V"]:
    sequences, recent = slots.bad[rows.slot], slots.recent[rows.slot]
    before = sequences[..., :-1]
    fits = jnp.all((before == NOTHING) | (before == recent[:, None, :]), axis=-1) & remembered[:, None]
    last = jnp.where(fits, sequences[..., -1], vocab_size)
    none = jnp.zeros((len(last), vocab_size), bool)
    return none.at[jnp.arange(len(last))[:, None], last].set(True, mode="drop")
