"""Draws have the distribution of a plain implementation, whatever is beside them in the batch."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from jinfercept.runner import sampling
from jinfercept.runner.packing_samples import (
    draw_needs,
    pack_positions,
    pack_samples,
    pack_slot,
    sampled_rows,
    slot_shapes,
    unpack_samples,
    unpack_slot,
)
from jinfercept.runner.sampling import (
    BLOCK,
    KINDS,
    Kind,
    SampleRows,
    Slots,
    _largest,
    _largest_of_blocks,
    logprobs,
    mask_words,
    remember,
    sample,
    shape_logits,
    top_k_of_blocks,
)
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import NOT_FINITE, NOTHING_ALLOWED, Chunk, Sample, TokenHistory, draw_options
from tests.support.sampling_reference import probabilities, shaped

VOCAB, NUM_DRAWS, NUM_SLOTS = 70, 3000, 3
PROMPT, OUTPUT = (1, 2, 3, 3, 50, 69), (4, 4, 4, 2, 60, 7, 8)
ENDS = (0, 5)
LOGITS = np.random.default_rng(0).normal(0.0, 1.5, VOCAB).astype(np.float32)
TOP_K = SampleRows._fields.index("top_k")
EMPTY = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), slot_shapes(NUM_SLOTS, VOCAB))
HISTORY = TokenHistory(PROMPT + OUTPUT, ((0, len(PROMPT)),))


@partial(jax.jit, static_argnums=0)
def draw(kind: Kind, logits: Array, packed: Array) -> Array:
    return sample(logits, unpack_samples(packed), kind)[0]


shape = jax.jit(lambda logits, mask, slots, packed: shape_logits(logits, mask, slots, unpack_samples(packed)))
enter = jax.jit(unpack_slot)
WAYS = (
    jax.jit(sampling._by_best),
    jax.jit(partial(sampling._by_digits, bits=1, unroll=False)),
    jax.jit(partial(sampling._by_digits, bits=sampling.BITS, unroll=True)),
)

CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "top_p of nothing": {"top_p": 0.0, "temperature": 9.0},
    "top_p close to one": {"top_p": 0.99},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.25},
    "bias": {"logit_bias": {9: 3.0, 69: 2.0, 2: -100.0}},
    "allowed": {"allowed_token_ids": [3, 31, 32, 33, 69]},
    "bad token": {"bad_words_token_ids": [[4], [69]]},
    "the same tokens": {"bad_words_token_ids": [[8, 4], [7, 8, 9], [60, 8, 10], [6, 7, 8, 2, 11]]},
    "min_tokens": {"min_tokens": 8},
    "min_tokens reached": {"min_tokens": 7},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "everything": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 2.0},
        "min_tokens": 9,
        "allowed_token_ids": list(range(64)),
        "bad_words_token_ids": [[8, 4], [31]],
    },
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
}


def chunks(all_params: Sequence[SamplingParams], first_key: int = 0) -> tuple[Chunk, ...]:
    """One sampled chunk for each, with random keys of their own; chunk `i` has the slot `i % NUM_SLOTS`."""
    return tuple(
        Chunk(
            number % NUM_SLOTS,
            12,
            (1,),
            (),
            Sample(
                params.temperature,
                first_key + number,
                draw_options(params, frozenset(ENDS)),
                len(OUTPUT) < params.min_tokens,
            ),
        )
        for number, params in enumerate(all_params)
    )


def draws(
    all_params: Sequence[SamplingParams],
    allowed: Sequence[int] | None = None,
    rows: int | None = None,
    first_key: int = 0,
    kind: Kind | None = None,
) -> np.ndarray:
    """One token for each, drawn as in a step of this kind, by default of the simplest that computes all; see `chunks`.

    The sequences in one slot must be alike.
    """
    slots, entered, drawing = EMPTY, set(), chunks(all_params, first_key)
    for chunk in drawing:
        assert chunk.sample is not None
        options = chunk.sample.options
        if options is not None and options.remembered and chunk.slot not in entered:
            entered.add(chunk.slot)
            slots = enter(slots, chunk.slot, pack_slot(options, HISTORY, VOCAB))
    drawn = sampled_rows(drawing)
    packed = pack_samples(drawn, rows or len(drawing), NUM_SLOTS)
    mask = np.full((packed.shape[1], mask_words(VOCAB)), 0xFFFFFFFF, np.uint32)
    if allowed is not None:
        bits = np.isin(np.arange(32 * mask_words(VOCAB)), allowed)
        mask[: len(drawing)] = np.packbits(bits, bitorder="little").view(np.uint32)
    logits = np.broadcast_to(LOGITS, (packed.shape[1], VOCAB))
    if allowed is not None or draw_needs(drawn)[1]:
        logits = shape(logits, mask, slots, packed)
    return np.asarray(draw(kind or draw_needs(drawn)[0], logits, packed))[: len(drawing)]


def expected(params: SamplingParams, mask: Sequence[int] | None = None) -> np.ndarray:
    return probabilities(shaped(LOGITS, params, PROMPT, OUTPUT, recent=OUTPUT, ends=ENDS, mask=mask), params)


def check_distribution(drawn: np.ndarray, chances: np.ndarray) -> None:
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[chances == 0].any(), "a token was drawn that is not in the reference's support"
    certain = chances * len(drawn) >= 5
    assert counts[chances * len(drawn) >= 20].all(), "a token of the reference's support was never drawn"
    seen, wanted = counts[certain], chances[certain] * len(drawn)
    rest = len(drawn) - seen.sum(), len(drawn) - wanted.sum()
    if rest[1] >= 5:
        seen, wanted = np.append(seen, rest[0]), np.append(wanted, rest[1])
    if len(seen) > 1:
        from scipy.stats import chisquare  # takes seconds

        assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_draws_are_distributed_as_in_a_plain_implementation(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 20} | CASES[name])
    check_distribution(draws([params] * NUM_DRAWS), expected(params))


@pytest.mark.parametrize("name", ["temperature", "everything"])
def test_a_mask_comes_before_everything_else(name: str) -> None:
    params, mask = SamplingParams(**{"max_tokens": 20} | CASES[name]), [0, 2, 4, 5, 7, 8, 31, 33, 62, 69]
    check_distribution(draws([params] * NUM_DRAWS, allowed=mask), expected(params, mask))


def test_what_leaves_nothing_to_draw_gives_way_but_a_mask_never_does() -> None:
    stuck = SamplingParams(allowed_token_ids=[4, 9], bad_words_token_ids=[[8, 4], [8, 9]])
    assert set(draws([stuck] * 50, rows=NUM_DRAWS)) == {4, 9}
    assert set(draws([stuck] * 50, [9, 10], NUM_DRAWS)) == {9}
    assert set(draws([stuck] * 50, [10], NUM_DRAWS)) == {10}
    early = SamplingParams(min_tokens=16)
    assert set(draws([early] * 50, ENDS, NUM_DRAWS)) == set(ENDS)


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    kinds = [SamplingParams(**{"max_tokens": 20} | case) for case in CASES.values()]
    for kind in kinds:
        [alone] = draws([kind], first_key=5)
        plain = SamplingParams(temperature=0.9)
        assert draws([kind, plain, plain, plain], first_key=5)[0] == alone
    mixed = [kinds[0], SamplingParams(top_p=0.5), SamplingParams(repetition_penalty=1.5)]
    together = draws(mixed, rows=4)  # one row is not used
    for number, params in enumerate(mixed):
        assert draws([params], first_key=number)[0] == together[number]


def test_a_row_has_the_same_token_in_every_kind_of_draw_that_has_what_it_needs() -> None:
    for name in ("temperature", "hot", "repetition", "greedy", "top_p"):
        params = [SamplingParams(**{"max_tokens": 20} | CASES[name])] * 300
        needed = draw_needs(sampled_rows(chunks(params)))[0]
        assert needed == {"greedy": "greedy", "top_p": "filtered"}.get(name, "drawn")
        kinds = KINDS[KINDS.index(needed) :]
        first, *others = [draws(params, kind=kind).tolist() for kind in kinds]
        assert all(other == first for other in others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [3 * BLOCK + 1, pytest.param(VOCAB, marks=pytest.mark.slow)])
def test_a_row_without_a_finite_largest_logit_has_no_token_and_no_other_row_is_changed(
    kind: Kind, columns: int
) -> None:
    params = {"greedy": {"temperature": 0.0}, "drawn": {}, "filtered": {"top_p": 0.9, "top_k": 50, "min_p": 1e-3}}[kind]
    rows = [np.random.default_rng(number).normal(size=columns).astype(np.float32) for number in range(8)]
    packed = pack_samples(sampled_rows(chunks([SamplingParams(**params)] * len(rows))), len(rows), NUM_SLOTS)
    before = np.asarray(draw(kind, jnp.asarray(rows), packed))
    assert (before >= 0).all()
    rows[1][:] = np.nan
    rows[2][-1] = -np.float32(np.nan)
    rows[4][columns // 2] = np.inf
    rows[5][:] = -np.inf
    rows[6][3:] = -np.inf  # some are left
    broken = {1: NOT_FINITE, 2: NOT_FINITE, 4: NOT_FINITE, 5: NOTHING_ALLOWED}
    after = np.asarray(draw(kind, jnp.asarray(rows), packed))
    assert {row: token for row, token in enumerate(after) if token < 0} == broken
    assert [after[row] for row in (0, 3, 7)] == [before[row] for row in (0, 3, 7)]
    assert 0 <= after[6] < 3
    reported, *_ = logprobs(jnp.asarray(rows), jnp.maximum(after, 0), 1)
    assert np.isnan(reported).tolist() == [row in broken for row in range(8)]
    for values in (np.asarray(rows), np.round(rows)):  # as other devices than CPUs find it
        (column, largest), (other, alike) = _largest(jnp.asarray(values)), _largest_of_blocks(jnp.asarray(values))
        np.testing.assert_array_equal(largest, alike)
        finite = np.isfinite(largest)
        np.testing.assert_array_equal(column[finite], other[finite])


def test_all_bits_of_a_random_key_count() -> None:
    hot = SamplingParams(temperature=1e6)
    drawn = [draws([hot], first_key=1 << bit)[0] for bit in range(64)]
    assert len(set(drawn)) > 20


def test_what_was_drawn_counts_at_once() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, bad_words_token_ids=[[8, 4], [1, 2, 3]])
    options = draw_options(params, frozenset())
    assert options is not None
    slots, output = enter(EMPTY, 1, pack_slot(options, HISTORY, VOCAB)), list(OUTPUT)
    chunk = Chunk(1, 0, (1,), (), Sample(0.0, 0, options))
    packed = pack_samples(sampled_rows((chunk,)), 1, NUM_SLOTS)
    mask = np.full((1, mask_words(VOCAB)), 0xFFFFFFFF, np.uint32)
    for _ in range(12):
        [token] = draw("greedy", shape(LOGITS[None], mask, slots, packed), packed)
        assert token == shaped(LOGITS, params, PROMPT, output, recent=output).argmax()
        slots = remember(slots, token[None], unpack_samples(jnp.asarray(packed)))
        output.append(int(token))
        rebuilt = pack_slot(options, TokenHistory((*PROMPT, *output), ((0, len(PROMPT)),)), VOCAB)
        again: Slots = enter(EMPTY, 1, rebuilt)
        for ours, theirs in zip(slots, again, strict=True):
            assert np.array_equal(ours[1], theirs[1])


@settings(max_examples=25)
@given(
    st.integers(0, 1 << 30),
    st.integers(0, 80),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.booleans(),
)
def test_the_bound_keeps_what_the_reference_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, scale: float, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, scale, (2, VOCAB)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    logits[1, rng.integers(0, VOCAB, 30)] = -np.inf
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    packed = pack_positions((), 2, NUM_SLOTS)
    packed[TOP_K] = top_k
    packed[TOP_K + 1 : TOP_K + 4] = np.array([[1.0], [top_p], [min_p]], np.float32).view(np.int32)
    for way in WAYS:
        bound = np.asarray(way(logits, unpack_samples(jnp.asarray(packed))))
        for row, limit in zip(logits, bound, strict=True):
            chances = probabilities(row.astype(np.float64), params)
            kept = (row >= limit) & np.isfinite(row)
            doubtful = abs(np.cumsum(np.sort(chances)[::-1]) - top_p).min() < 1e-5  # a sum that only rounding decides
            assert doubtful or np.array_equal(kept, (chances > 0) & np.isfinite(row))


def test_the_bound_of_a_large_vocabulary_does_not_depend_on_how_it_is_found() -> None:
    logits = np.random.default_rng(3).normal(0.0, [[1.0], [3.0], [0.01], [8.0]], (4, 5000)).astype(np.float32)
    packed = pack_positions((), 4, NUM_SLOTS)
    packed[TOP_K] = [0, 40, 3000, 0]
    packed[TOP_K + 1 : TOP_K + 4] = np.array(
        [[1.0] * 4, [0.9, 0.95, 1.0, 1.0], [0.0, 0.0, 0.0, 0.05]], np.float32
    ).view(np.int32)
    rows = unpack_samples(jnp.asarray(packed))
    by_best, *others = (np.asarray(way(logits, rows)) for way in WAYS)
    assert all(np.array_equal(by_best, other) for other in others)
    assert np.array_equal(np.asarray(jax.jit(sampling.bounds)(logits, rows)), by_best)
    assert (logits[2] >= by_best[2]).sum() == 3000


def test_the_likeliest_token_is_left_of_a_share_of_nothing() -> None:
    rows = unpack_samples(jnp.asarray(pack_samples(sampled_rows(chunks([SamplingParams(top_p=0)])), 1, NUM_SLOTS)))
    assert [np.asarray(way(LOGITS[None], rows)).tolist() for way in WAYS] == [[LOGITS.max()]] * len(WAYS)


@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_of_blocks_are_those_of_a_sort_of_equals_the_first(ties: bool) -> None:
    values = np.random.default_rng(4).normal(0.0, 3.0, (6, 20 * BLOCK + 333)).astype(np.float32)
    values = np.round(values) if ties else values
    values[1, 5:] = -np.inf
    values[2, ::2] = -np.inf
    order = np.argsort(-values, axis=-1, kind="stable")[:, :20]
    best, columns = jax.jit(partial(top_k_of_blocks, k=20))(values)
    assert np.array_equal(columns, order)
    assert np.array_equal(best, np.take_along_axis(values, order, axis=1))


def test_log_probabilities_are_those_of_a_softmax_and_ranks_begin_at_one() -> None:
    logits = np.random.default_rng(1).normal(0.0, 2.0, (5, VOCAB)).astype(np.float32)
    tokens = np.array([0, 9, 33, 69, int(logits[4].argmax())])
    chosen, rank, best, ids = jax.jit(partial(logprobs, num_best=4))(logits, tokens)
    reference = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1)
    assert np.allclose(chosen, reference[range(5), tokens], atol=1e-5)
    assert [int(place) for place in rank] == [1 + int(np.where(order[i] == tokens[i])[0][0]) for i in range(5)]
    assert np.array_equal(ids, order[:, :4])
    assert np.allclose(best, np.take_along_axis(reference, order[:, :4], axis=1), atol=1e-5)
