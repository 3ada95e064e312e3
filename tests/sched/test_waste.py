"""Equations (2) and (4) against numbers worked out by hand, and what must hold for every context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sched.waste import chunk_tokens, chunked_discard_waste, preserve_waste

contexts = st.integers(0, 3000)
others = st.integers(0, 60_000)
chunks = st.integers(1, 700)


def affine(query_tokens: int) -> float:
    """T_fwd(x) = 0.001·x + 0.1 seconds."""
    return 0.001 * query_tokens + 0.1


def roofline(query_tokens: int) -> float:
    """T_fwd(x) = max(0.1, 0.001·x) seconds: flat up to 100 tokens."""
    return max(0.1, 0.001 * query_tokens)


def test_preserve_is_time_times_context() -> None:
    assert preserve_waste(2.5, 400) == 1000.0
    assert preserve_waste(0.0, 400) == 0.0


def test_chunked_recomputation_holds_half_and_pays_for_every_chunk() -> None:
    # T(250) · 250 / 2 + (0.1 + 0.1 + 0.05) · 1000, chunks of 100, 100 and 50
    assert chunked_discard_waste(250, 1000, 100, affine) == pytest.approx(0.35 * 125 + 250.0)


def test_a_chunk_that_divides_the_context_pays_for_its_last_one_too() -> None:
    # T(200) · 200 / 2 + 2 · 0.1 · 1000: two chunks of 100, not one
    assert chunked_discard_waste(200, 1000, 100, affine) == pytest.approx(30.0 + 200.0)
    assert chunked_discard_waste(100, 1000, 100, affine) == pytest.approx(10.0 + 100.0)


def test_a_chunk_larger_than_the_context_is_the_context() -> None:
    assert chunked_discard_waste(200, 1000, 5000, affine) == pytest.approx(30.0 + 200.0)


def test_chunks_within_the_flat_part_cost_others_nothing() -> None:
    # T(200) · 200 / 2 only
    assert chunked_discard_waste(200, 1_000_000, 100, roofline) == pytest.approx(20.0)


def test_a_chunk_fills_the_step_up_to_saturation() -> None:
    assert chunk_tokens(384, 84, 16) == 300


def test_a_long_prompt_in_flight_does_not_shrink_the_chunk_to_one_token() -> None:
    assert chunk_tokens(384, 383, 16) == 16
    assert chunk_tokens(384, 4000, 16) == 16


@given(contexts, contexts, others, chunks)
def test_a_longer_context_never_wastes_less(first: int, second: int, num_others: int, chunk: int) -> None:
    short, long = sorted((first, second))
    for forward_s in (affine, roofline):
        less, more = (chunked_discard_waste(context, num_others, chunk, forward_s) for context in (short, long))
        assert less <= more * (1 + 1e-12)
    assert preserve_waste(1.5, short) <= preserve_waste(1.5, long)


@given(contexts, chunks)
def test_the_chunks_that_are_paid_for_cover_the_context_and_no_chunk_more(context: int, chunk: int) -> None:
    paid: list[int] = []

    def forward_s(query_tokens: int) -> float:
        paid.append(query_tokens)
        return float(query_tokens > 0)

    num_chunks = chunked_discard_waste(context, 1, chunk, forward_s) - float(context > 0) * context / 2
    assert num_chunks * chunk >= context
    assert (num_chunks - 1) * chunk < context
    assert max(paid) <= max(chunk, context)
