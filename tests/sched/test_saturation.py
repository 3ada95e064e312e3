"""The break between a flat and a growing step time, found in points with and without noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.errors import ConfigError
from jinfercept.sched.fit import saturation

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


def test_the_order_of_points_does_not_matter() -> None:
    points = [(x, step_s(x)) for x in BUCKETS]
    assert saturation(points[::-1]) == saturation(points)


def test_steps_that_never_grow_saturate_at_the_largest_bucket() -> None:
    fit = saturation([(x, 0.01) for x in BUCKETS])
    assert fit[:3] == pytest.approx((0.01, 0.0, 0.0))
    assert fit.query_tokens == 2048


def test_steps_that_grow_from_the_start_saturate_at_the_smallest() -> None:
    assert saturation([(x, 0.001 * x + 0.01) for x in BUCKETS]).query_tokens == 1


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
