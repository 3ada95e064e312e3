"""Packs a slot's sampling state into one int32 vector, and unpacks it on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.runner.logits_processors import IN_PROMPT, NOTHING, Slots, mask_words
from jinfercept.sampling_params import MAX_BAD_SEQUENCES, MAX_BAD_TOKENS, MAX_BIASED_TOKENS
from jinfercept.sched.sampling_options import DrawOptions, TokenHistory

_RECENT = MAX_BAD_TOKENS - 1


class _Parts(NamedTuple):
    """A slot's state: the parts of the vector, by the names and in the order of `Slots`."""

    recent: np.ndarray
    counts: np.ndarray
    allowed: np.ndarray
    ends: np.ndarray
    biased: np.ndarray
    bias: np.ndarray
    bad: np.ndarray


def pack_slot(options: DrawOptions, history: TokenHistory, vocab_size: int) -> Int32[np.ndarray, "slot"]:
    """The packed state of a sequence that gets a slot."""
    params = options.params
    vector = np.zeros(slot_size(vocab_size), np.int32)
    parts = _split_slot(vector, vocab_size)
    _count(parts, history, vocab_size)
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


def unpack_slot(slots: Slots, slot: Int[Array, ""], packed: Int[Array, "slot"]) -> Slots:
    """The slots, with the state of one of them replaced by a packed one."""
    parts = _split_slot(packed, slots.counts.shape[1])
    return Slots(
        *(
            whole.at[slot].set(jax.lax.bitcast_convert_type(part, whole.dtype))
            for whole, part in zip(slots, parts, strict=True)
        )
    )


def slot_shapes(num_slots: int, vocab_size: int) -> Slots:
    """Shapes and types of the slots' state, the scratch slot included."""
    words, rows = mask_words(vocab_size), num_slots + 1
    shapes = {
        "recent": ((_RECENT,), jnp.int32),
        "counts": ((vocab_size,), jnp.int32),
        "allowed": ((words,), jnp.uint32),
        "ends": ((words,), jnp.uint32),
        "biased": ((MAX_BIASED_TOKENS,), jnp.int32),
        "bias": ((MAX_BIASED_TOKENS,), jnp.float32),
        "bad": ((MAX_BAD_SEQUENCES, MAX_BAD_TOKENS), jnp.int32),
    }
    return Slots(**{name: jax.ShapeDtypeStruct((rows, *dims), dtype) for name, (dims, dtype) in shapes.items()})  # pyright: ignore[reportArgumentType]


def slot_size(vocab_size: int) -> int:
    """Length of a slot's vector."""
    return _slot_ends(vocab_size)[-1]


def _count(parts: _Parts, history: TokenHistory, vocab_size: int) -> None:
    """Fill in the counts of generated tokens, the marks of tokens from outside, and the tokens generated last."""
    tokens = np.array(history.tokens, np.int32)
    generated = np.ones(len(tokens), bool)
    for start, end in history.external_spans:
        generated[start:end] = False
    parts.counts[:] = np.bincount(tokens[generated], minlength=vocab_size)
    parts.counts[tokens[~generated]] |= IN_PROMPT
    recent = np.where(generated, tokens, NOTHING)[-_RECENT:]
    parts.recent[:] = NOTHING
    parts.recent[_RECENT - len(recent) :] = recent


def _words(allowed: np.ndarray) -> Int32[np.ndarray, "words"]:
    """A mask's bits as words."""
    padded = np.zeros(32 * mask_words(len(allowed)), bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _slot_ends(vocab_size: int) -> list[int]:
    """Where the parts of a slot's vector end."""
    words = mask_words(vocab_size)
    sizes = (_RECENT, vocab_size, words, words, MAX_BIASED_TOKENS, MAX_BIASED_TOKENS)
    return np.cumsum([*sizes, MAX_BAD_SEQUENCES * MAX_BAD_TOKENS]).tolist()


def _split_slot(vector, vocab_size: int) -> _Parts:
    ends = _slot_ends(vocab_size)
    parts = [vector[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    parts[-1] = parts[-1].reshape(MAX_BAD_SEQUENCES, MAX_BAD_TOKENS)
    return _Parts(*parts)
