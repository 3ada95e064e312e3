"""The gated delta rule and the convolution before it, for ragged rows, are those of one token after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.models.delta_rule import BLOCK_TOKENS, DeltaInputs, gated_delta_rule
from jinfercept.pallas.layouts.states import StateRows, causal_convolution

NUM_STATES, HEADS, GROUP, KEYS, VALUES, TAPS = 8, 2, 3, 4, 5, 4
LONG = BLOCK_TOKENS + 7


def rows_of(
    chunks: list[tuple[int, int, int]],
    num_rows: int,
    sources: dict[int, int] | None = None,
    drafts: dict[int, int] | None = None,
) -> StateRows:
    """Rows of chunks, each with its slot, its first position and its length; those of one token come first.

    Args:
        sources: the slots that are read, by those that are written, where they differ.
        drafts: how many tokens of a row are drafts, by the slots that are written.
    """
    lengths = [length for _, _, length in chunks] + [0] * (num_rows - len(chunks))
    slots = [slot for slot, _, _ in chunks] + [0] * (num_rows - len(chunks))
    ends = [start + length for _, start, length in chunks] + [0] * (num_rows - len(chunks))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_decode = jnp.int32(sum(length == 1 for _, _, length in chunks))
    read = [(sources or {}).get(slot, slot) for slot in slots]
    return StateRows(
        jnp.array(slots, jnp.int32),
        jnp.array(read, jnp.int32),
        jnp.array([(drafts or {}).get(slot, 0) for slot in slots], jnp.int32),
        jnp.array(starts),
        jnp.array(ends, jnp.int32),
        num_decode,
    )


def drawn(num_tokens: int, seed: int) -> DeltaInputs:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((num_tokens, HEADS, KEYS)).astype(np.float32) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((num_tokens, HEADS, GROUP, VALUES)).astype(np.float32)
    decay = -rng.exponential(0.2, (num_tokens, HEADS, GROUP)).astype(np.float32)
    beta = rng.uniform(0, 1, (num_tokens, HEADS, GROUP)).astype(np.float32)
    return DeltaInputs(*map(jnp.asarray, (q, k, v, decay, beta)))


def one_by_one(
    inputs: DeltaInputs, states: np.ndarray, chunks: list[tuple[int, int, int]], sources: dict[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in float64, as the module states it."""
    q, k, v, decay, beta = (np.asarray(part, np.float64) for part in inputs)
    states, read, token = states.astype(np.float64), np.zeros(v.shape), 0
    for slot, start, length in chunks:
        state = np.zeros_like(states[slot]) if start == 0 else states[(sources or {}).get(slot, slot)].copy()
        for _ in range(length):
            state *= np.exp(decay[token])[..., None, None]
            wrong = v[token] - np.einsum("kd,kgdw->kgw", k[token], state)
            state += np.einsum("kd,kgw->kgdw", k[token], wrong * beta[token][..., None])
            read[token] = np.einsum("kd,kgdw->kgw", q[token], state)
            token += 1
        states[slot] = state
    return read, states


@pytest.mark.parametrize(
    ("chunks", "sources"),
    [
        ([(1, 0, 1)], {}),
        ([(2, 9, 1), (1, 0, 1), (5, 3, 1)], {}),
        ([(3, 0, LONG)], {}),
        ([(1, 7, 1), (2, 0, 3), (3, 64, BLOCK_TOKENS), (4, 5, LONG), (5, 1, 2)], {}),
        ([(1, 7, 1), (2, 7, 1), (3, 9, 1), (4, 64, LONG), (5, 64, 9)], {1: 6, 2: 6, 4: 7, 5: 6}),
    ],
    ids=["first token", "decode rows", "a chunk from the start", "all kinds", "states of other slots"],
)
def test_rows_compute_what_their_tokens_do_one_after_the_other(
    chunks: list[tuple[int, int, int]], sources: dict[int, int]
) -> None:
    num_tokens = sum(length for _, _, length in chunks)
    inputs = drawn(num_tokens + 5, seed=num_tokens)  # with padding, which is no row's
    states = np.random.default_rng(1).standard_normal((NUM_STATES, HEADS, GROUP, KEYS, VALUES)).astype(np.float32)
    rows = rows_of(chunks, num_rows=len(chunks) + 2, sources=sources)
    read, behind = jax.jit(gated_delta_rule)(inputs, jnp.asarray(states), rows)
    expected_read, expected_behind = one_by_one(inputs, states, chunks, sources)
    np.testing.assert_allclose(read[:num_tokens], expected_read[:num_tokens], atol=2e-5)
    np.testing.assert_allclose(behind, expected_behind, atol=2e-5)
    others = [slot for slot in range(NUM_STATES) if slot not in {slot for slot, _, _ in chunks}]
    np.testing.assert_array_equal(behind[jnp.array(others)], states[others])


def test_the_state_behind_a_row_has_not_seen_its_drafts() -> None:
    chunks, drafts = [(1, 7, 1), (2, 5, 4), (3, 0, 3), (4, 9, LONG), (5, 2, 6)], {2: 3, 3: 1, 5: 5}
    inputs, num_tokens = drawn(14 + LONG, 1), 14 + LONG
    states = np.random.default_rng(1).standard_normal((NUM_STATES, HEADS, GROUP, KEYS, VALUES)).astype(np.float32)
    rows = rows_of(chunks, len(chunks) + 1, drafts=drafts)
    read, behind = jax.jit(gated_delta_rule)(inputs, jnp.asarray(states), rows)
    expected_read, whole = one_by_one(inputs, states, chunks)
    np.testing.assert_allclose(read[:num_tokens], expected_read, atol=2e-5)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((num_tokens, 2, 3)), jnp.float32)
    taps, tokens = jnp.ones((TAPS, 2, 3)), jnp.zeros((NUM_STATES, TAPS - 1, 2, 3))
    seen_tokens, start = causal_convolution(x, taps, tokens, rows)[1], 0
    for slot, first, length in chunks:
        kept = length - drafts.get(slot, 0)
        part = DeltaInputs(*(field[start : start + kept] for field in inputs))
        alone = whole if kept == length else one_by_one(part, states, [(slot, first, kept)])[1]
        np.testing.assert_allclose(behind[slot], alone[slot], atol=2e-5)
        of_row = causal_convolution(x[start : start + kept], taps, tokens, rows_of([(slot, first, kept)], 1))[1]
        np.testing.assert_array_equal(seen_tokens[slot], of_row[slot])
        start += length


@pytest.mark.parametrize("most", [1, 5])
def test_many_short_rows_are_computed_in_turns(most: int) -> None:
    num_rows = 70
    chunks = [(slot, 3, 1 if slot < 20 else most) for slot in range(1, num_rows)]
    num_tokens = sum(length for _, _, length in chunks)
    inputs, states = drawn(num_tokens, 3), jnp.ones((num_rows, HEADS, GROUP, KEYS, VALUES))
    read, behind = jax.jit(gated_delta_rule)(inputs, states, rows_of(chunks, num_rows))
    expected_read, expected_behind = one_by_one(inputs, np.asarray(states), chunks)
    np.testing.assert_allclose(read, expected_read, atol=2e-5)
    np.testing.assert_allclose(behind, expected_behind, atol=2e-5)


@pytest.mark.parametrize("lengths", [[1] * 9, [4, 5], [2, 1, 6], [9]])
def test_a_convolution_goes_on_from_chunk_to_chunk(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, taps = rng.standard_normal((9, 2, 3)).astype(np.float32), rng.standard_normal((TAPS, 2, 3)).astype(np.float32)
    padded = np.concatenate([np.zeros((TAPS - 1, 2, 3)), x])
    expected = sum(padded[tap : tap + 9] * taps[tap] for tap in range(TAPS))
    state, start, parts = jnp.full((4, TAPS - 1, 2, 3), 7.0), 0, []
    for length in lengths:
        chunk = jnp.asarray(np.concatenate([x[start : start + length], np.full((2, 2, 3), 9.0, np.float32)]))
        part, state = jax.jit(causal_convolution)(chunk, jnp.asarray(taps), state, rows_of([(2, start, length)], 3))
        parts.append(part[:length])
        start += length
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-5)
    np.testing.assert_allclose(state[2], x[-(TAPS - 1) :], atol=1e-6)
    assert np.all(state[jnp.array([0, 1, 3])] == 7.0)
