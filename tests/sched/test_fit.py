"""The terms of a step's price come back out of steps that were made of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.errors import ConfigError
from jinfercept.sched.fit import MeasuredStep, fit_link, fit_steps, saturation

BASES = {1: 0.010, 8: 0.010, 32: 0.011, 128: 0.019, 512: 0.058}


def steps(noise: random.Random | None = None, share: float = 0.03) -> list[MeasuredStep]:
    """2 µs per context token, 5 ns per pair."""
    kinds = [(bucket, context, None) for bucket in BASES for context in (bucket, 2000, 8000)]
    kinds += [(bucket, depth + bucket, depth) for bucket in BASES if bucket > 1 for depth in (0, 1500)]
    return [
        MeasuredStep(
            bucket,
            context,
            depth,
            (BASES[bucket] + 2e-6 * context + 5e-9 * bucket * (depth or 0))
            * (noise.uniform(1 - share, 1 + share) if noise else 1.0),
        )
        for bucket, context, depth in kinds
    ]


def test_exact_steps_give_their_terms_back() -> None:
    fit = fit_steps(steps())
    assert fit.bucket_tokens == tuple(BASES)
    assert fit.bucket_s == pytest.approx(tuple(BASES.values()))
    assert fit.per_context_s == pytest.approx(2e-6)
    assert fit.per_pair_s == pytest.approx(5e-9)
    assert fit.line.query_tokens == 32
    assert fit.line.per_query_s == pytest.approx(39 / 384 * 1e-3, rel=0.1)


def test_noise_and_a_disturbed_step_move_no_term_far() -> None:
    for seed in range(20):
        measured = steps(random.Random(seed))
        measured[7] = measured[7]._replace(seconds=5 * measured[7].seconds)
        fit = fit_steps(measured)
        assert fit.bucket_s == pytest.approx(tuple(BASES.values()), rel=0.2)
        assert fit.per_context_s == pytest.approx(2e-6, rel=0.2)
        assert fit.line.query_tokens in (8, 32)


def test_what_was_not_measured_costs_nothing() -> None:
    fit = fit_steps([MeasuredStep(8, 8, None, 0.01)])
    assert fit == ((8,), (0.01,), 0.0, 0.0, (0.01, 0.0, 0.0, 8))
    with pytest.raises(ConfigError, match="fitting needs decode steps"):
        fit_steps([MeasuredStep(8, 8, 0, 0.01)])


def test_a_larger_bucket_is_never_cheaper_and_none_is_free() -> None:
    measured = [MeasuredStep(1, 1, None, 0.02), MeasuredStep(8, 8, None, 0.01), MeasuredStep(8, 800, None, 0.05)]
    fit = fit_steps([*measured, MeasuredStep(32, 5000, None, 0.05)])
    assert list(fit.bucket_s) == sorted(fit.bucket_s)
    assert min(fit.bucket_s) > 0


def test_a_link_is_a_rate_and_a_cost_per_transfer() -> None:
    noise = random.Random(0)
    sizes = (16, 32, 64, 128, 256, 512, 1024)
    fit = fit_link([(tokens, (0.003 + tokens / 50_000) * noise.uniform(1.0, 1.02)) for tokens in sizes])
    assert fit.tokens_per_s == pytest.approx(50_000, rel=0.1)
    assert fit.copy_s == pytest.approx(0.003, rel=0.1)
    assert fit_link([(64, 0.01)]) == (6400.0, 0.0)
    assert fit_link([(16, 0.02), (64, 0.01)]).tokens_per_s == 6400.0  # noise: more is not faster


BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)


def step_s(x: int) -> float:
    """Flat at 10 ms up to 128 tokens."""
    return max(0.010, 0.0000625 * x + 0.002)


def test_exact_points_give_the_line_and_the_break_back() -> None:
    fit = saturation([(x, step_s(x)) for x in BUCKETS])
    assert fit[:3] == pytest.approx((0.010, 0.0000625, 0.002))
    assert fit.query_tokens == 128


def test_noise_does_not_move_the_break() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        points = [(x, step_s(x) * rng.uniform(0.97, 1.03)) for x in BUCKETS for _ in range(5)]
        fit = saturation(points)
        assert fit.query_tokens == 128
        assert fit.flat_s == pytest.approx(0.010, rel=0.03)
        assert fit.per_query_s == pytest.approx(0.0000625, rel=0.06)


def test_one_bucket_or_two_tell_what_they_can() -> None:
    assert saturation([(8, 0.1)]) == pytest.approx((0.1, 0.0, 0.0, 8))
    assert saturation([(1, 0.1), (8, 0.105)]).query_tokens == 8  # a difference of 5 % is noise
    assert saturation([(1, 0.1), (8, 0.17)]) == pytest.approx((0.1, 0.01, 0.09, 1))


@pytest.mark.parametrize("points", [[], [(1, 0.1), (2, 0.0), (3, 0.2)], [(1, float("inf"))]])
def test_without_points_or_times_there_is_nothing_to_fit(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError, match="needs positive times"):
        saturation(points)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 10.0)), min_size=1, max_size=30))
def test_whatever_is_measured_gives_a_profile_that_can_be_used(points: list[tuple[int, float]]) -> None:
    fit = saturation(points)
    assert fit.query_tokens in {x for x, _ in points}
    assert fit.flat_s > 0
    assert fit.per_query_s >= 0
