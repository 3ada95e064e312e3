"""The distribution of a tool's durations, against numbers worked out by hand and against the plain sums it replaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import RING, DurationHistory, Seen, remaining_s
from jinfercept.sched.sequence import PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator

durations = st.lists(st.floats(0, 100), min_size=1, max_size=30)


def history_of(*seen: tuple[float, bool]) -> DurationHistory:
    history = DurationHistory()
    for duration_s, censored in seen:
        history.end(None, Seen(duration_s, censored))
    return history


def test_a_censored_duration_hands_its_weight_to_all_that_lasted_longer() -> None:
    # Kaplan and Meier: P(X > 1) = 3/4, one leaves at 2, P(X > 3) = 3/4 · 1/2, P(X > 4) = 0
    curve = history_of((1.0, False), (2.0, True), (3.0, False), (4.0, False)).curve
    assert [curve.left(t) for t in (0, 1, 2, 3, 4)] == pytest.approx([1, 3 / 4, 3 / 4, 3 / 8, 0])
    assert curve.remaining_s(2.0) == pytest.approx((1 + 2) / 2)


def test_an_end_counts_before_a_censoring_at_the_same_time() -> None:
    curve = history_of((1.0, True), (1.0, False), (2.0, False)).curve
    assert curve.left(1.0) == pytest.approx(2 / 3)


def test_what_outlasted_every_end_is_expected_to_last_the_longer_the_older_it_is() -> None:
    curve = history_of((1.0, False), (10.0, True)).curve
    assert [curve.left(t) for t in (1.0, 19.0, 20.0)] == pytest.approx([1 / 2, 1 / 2, 0.0])
    assert [curve.remaining_s(t) for t in (1.0, 10.0, 19.0)] == pytest.approx([20.0, 29.0, 38.0])
    assert curve.remaining_s(0.0) == pytest.approx((1 + (1 + 20)) / 2)


def test_where_few_end_and_soon_whoever_is_oldest_is_expected_last() -> None:
    history = history_of(*[(2.0, False)] * 5)
    for index in range(45):
        history.start(index, float(index))
    rests = [history.curve.remaining_s(age) for age in (2.0, 5.0, 20.0, 40.0)]
    assert rests == sorted(rests)
    assert all(history.curve.remaining_s(age) < rests[0] for age in (0.0, 1.0, 1.9))


def test_only_the_last_durations_are_remembered() -> None:
    history = history_of(*[(500.0, False)] * 40, *[(float(index), False) for index in range(RING)])
    assert history.curve.times == tuple(map(float, range(RING)))


@given(durations, st.floats(0, 120), st.floats(0, 50))
def test_without_censoring_it_is_the_plain_mean_over_what_lasted_longer(
    samples: list[float], age_s: float, horizon_s: float
) -> None:
    curve = history_of(*((x, False) for x in samples)).curve
    longer = [x - age_s for x in samples if x > age_s]
    assert curve.left(age_s) == pytest.approx(len(longer) / len(samples))
    if longer:
        assert curve.remaining_s(age_s) == pytest.approx(sum(longer) / len(longer), abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1, max_size=30))
def test_it_is_a_distribution_and_censoring_only_makes_it_longer(seen: list[tuple[float, bool]]) -> None:
    curve = history_of(*seen).curve
    taken_for_ends = history_of(*((duration_s, False) for duration_s, _ in seen)).curve
    assert curve.mass[0] == pytest.approx(1.0)
    assert curve.mass[-1] == 0.0
    assert list(curve.mass) == sorted(curve.mass, reverse=True)
    assert list(curve.times) == sorted(curve.times)
    for duration_s, _ in seen:
        assert curve.left(duration_s) >= taken_for_ends.left(duration_s) - 1e-9


def test_a_long_history_is_not_summed_up_again_for_every_call() -> None:
    history = history_of(*[(1.0, False)] * RING)
    curve = history.curve
    for _ in range(RING // 32):
        history.end(None, Seen(2.0, False))
        assert history.curve is curve
    history.end(None, Seen(2.0, False))
    assert history.curve.left(1.0) == pytest.approx((RING // 32 + 1) / RING)


def waiting(*calls: PendingCall) -> Sequence:
    sequence = Sequence("s", [1], KVManager(4, 0, 4).open(), max_tokens=1)
    sequence.calls = sequence.awaited = calls
    return sequence


def test_a_call_that_has_returned_is_waited_for_no_more() -> None:
    oracle = OracleEstimator()
    calls = [PendingCall("t", i, expected_s=seconds, head_start_s=1.0) for i, seconds in enumerate((3.0, 9.0))]
    for call in calls:
        oracle.started(call, 0.0)
    sequence = waiting(*calls)
    assert remaining_s(oracle, sequence, 0.5) == pytest.approx(7.5)
    sequence.awaited = (calls[0],)
    assert remaining_s(oracle, sequence, 0.5) == 1.5
