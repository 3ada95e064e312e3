"""What estimators predict, how long they hold, and what holding costs against knowing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.bench.single_request import held_cost
from jinfercept.sched.estimator import TRUST, ElapsedEstimator, HistoryEstimator, OracleEstimator

seconds = st.floats(0, 1000)


def taught(*durations: float, trust: float = TRUST) -> HistoryEstimator:
    """A history of the tool "search"."""
    estimator = HistoryEstimator(trust)
    for duration_s in durations:
        estimator.observe("search", duration_s)
    return estimator


def test_elapsed_expects_as_much_again_and_holds_until_it_breaks_even() -> None:
    estimator = ElapsedEstimator()
    assert estimator.duration_s("search", 3.0) == 3.0
    assert estimator.remaining_s("search", 3.0) == 3.0
    assert estimator.hold_until_s("search", 2.0, 10.0) == 5.0
    assert estimator.survival("search", 3.0, 0.0) == 1.0
    assert estimator.survival("search", 3.0, 3.0) == 0.25
    assert estimator.survival("search", 0.0, 1.0) == 0.0


def test_the_survival_of_elapsed_has_the_age_as_its_mean() -> None:
    step = 0.05
    mean = sum(ElapsedEstimator().survival("search", 3.0, (i + 0.5) * step) for i in range(200_000)) * step
    assert mean == pytest.approx(3.0, rel=1e-3)


def test_history_is_the_mean_of_what_lasted_longer() -> None:
    estimator = taught(1.0, 2.0, 6.0)
    assert estimator.remaining_s("search", 0.0) == pytest.approx(3.0)
    assert estimator.remaining_s("search", 1.0) == pytest.approx((1 + 5) / 2)
    assert estimator.duration_s("search", 1.0) == pytest.approx(4.0)
    assert estimator.remaining_s("search", 2.5) == pytest.approx(3.5)
    assert estimator.survival("search", 1.0, 2.0) == pytest.approx(1 / 2)


def test_a_call_that_outlasts_everything_known_is_expected_to_last_as_long_again() -> None:
    estimator = taught(1.0, 2.0, 6.0)
    assert estimator.remaining_s("search", 6.0) == 6.0
    assert estimator.duration_s("search", 7.0) == 14.0
    assert estimator.survival("search", 7.0, 7.0) == 0.25


def test_tools_are_told_apart_and_a_new_one_starts_with_everybodys_history() -> None:
    estimator = taught(1.0, 3.0)
    estimator.observe("person", 20.0)
    assert estimator.remaining_s("search", 0.0) == pytest.approx(2.0)
    assert estimator.remaining_s("person", 0.0) == pytest.approx(20.0)
    estimator.started("first", "painter", 0.0)
    assert estimator.remaining_s("painter", 0.0) == pytest.approx(8.0)
    estimator.observe("painter", 5.0, call_key="first")
    assert estimator.remaining_s("painter", 0.0) == pytest.approx(5.0)


def test_with_nothing_known_history_is_elapsed() -> None:
    estimator = HistoryEstimator()
    estimator.started("first", "search", 0.0)
    for age_s in (0.0, 4.0):
        assert estimator.remaining_s("search", age_s) == age_s
        assert estimator.survival("search", age_s, 2.0) == ElapsedEstimator().survival("search", age_s, 2.0)
    assert estimator.hold_until_s("search", 2.0, 10.0) == 5.0


def test_calls_in_flight_count_for_at_least_their_age() -> None:
    estimator = taught(1.0, 1.0, 40.0)
    assert estimator.survival("search", 0.0, 1.0) == pytest.approx(1 / 3)
    for index in range(9):
        estimator.started(index, "search", 0.0)
    estimator.started("last", "search", 30.0)
    assert estimator.survival("search", 0.0, 1.0) == pytest.approx(10 / 12)  # 2 of 12 ended by then
    assert estimator.remaining_s("search", 0.0) == pytest.approx((2 * 1 + 10 * 40) / 12)
    for index in range(9):
        estimator.observe("search", 30.0, clean=False, call_key=index)
    assert estimator.survival("search", 0.0, 1.0) == pytest.approx(10 / 12)


def test_a_tool_that_only_ever_times_out_is_not_held_for() -> None:
    clean, killed = HistoryEstimator(), HistoryEstimator()
    for _ in range(5):
        clean.observe("search", 3.0)
        killed.observe("search", 3.0, clean=False)
    assert clean.remaining_s("search", 2.0) == pytest.approx(1.0)
    assert killed.remaining_s("search", 2.0) == pytest.approx(6.0 + 2.0)
    assert clean.hold_until_s("search", 1.0, 5.0) == 5.0
    assert killed.hold_until_s("search", 1.0, 5.0) == 5.0 * TRUST


def test_holding_times_are_the_cheapest_of_the_candidates() -> None:
    # B/c = 8 s. Sums over the samples and one that never ends: leaving at once costs 4 · 8 = 32; holding 1 s costs
    # 1 + 1 + 1 + (1 + 8) + 8 · 1 for the sample of 30 s; 2 s would only add to the two long ones
    assert taught(0.9, 0.9, 0.9, 30.0).hold_until_s("search", 1.0, 8.0) == 1.0
    assert taught(30.0, 30.0).hold_until_s("search", 1.0, 8.0) == 8.0 * TRUST  # leave at once
    assert taught(*[6.0] * 5).hold_until_s("search", 1.0, 8.0) == 8.0
    assert taught(*[15.0] * 6).hold_until_s("search", 1.0, 8.0) == 8.0 * TRUST
    assert taught(*[15.0] * 5, *[0.1] * 100).hold_until_s("search", 1.0, 8.0) == 0.125


def test_holding_times_stay_within_the_clamp() -> None:
    assert taught(30.0, 30.0, trust=0.25).hold_until_s("search", 1.0, 8.0) == 2.0
    assert taught(0.01, trust=1.0).hold_until_s("search", 1.0, 8.0) == 8.0


def test_a_hint_is_believed_until_the_call_outlasts_it() -> None:
    estimator = taught(1.0, 2.0, 40.0)
    estimator.started("render", "search", 0.0, hint_s=10.0)
    assert estimator.remaining_s("search", 4.0, "render") == 6.0
    assert estimator.duration_s("search", 4.0, "render") == 10.0
    assert estimator.survival("search", 4.0, 5.0, "render") == 1.0
    assert estimator.survival("search", 4.0, 6.0, "render") == 0.0
    assert estimator.remaining_s("search", 12.0, "render") == estimator.remaining_s("search", 12.0)
    assert estimator.hold_until_s("search", 1.0, 8.0, "render") == 8.0 * TRUST
    assert estimator.hold_until_s("search", 1.0, 12.0, "render") == 12.0 / TRUST
    estimator.observe("search", 10.0, call_key="render")
    assert estimator.remaining_s("search", 4.0, "render") == estimator.remaining_s("search", 4.0)


def test_the_oracle_knows() -> None:
    estimator = OracleEstimator()
    estimator.started("call", "search", 5.0, hint_s=3.0)
    assert estimator.duration_s("search", 1.0, "call") == 3.0
    assert estimator.remaining_s("search", 1.0, "call") == 2.0
    assert estimator.remaining_s("search", 3.5, "call") == 0.0  # its return is not read yet
    assert [estimator.survival("search", 1.0, t, "call") for t in (1.9, 2.0)] == [1.0, 0.0]
    assert estimator.hold_until_s("search", 1.0, 3.0, "call") == math.inf
    assert estimator.hold_until_s("search", 1.0, 2.9, "call") == 0.0
    estimator.observe("search", 3.0, call_key="call")
    with pytest.raises(AssertionError, match="told of"):
        estimator.remaining_s("search", 1.0, "call")


# -- cost against the optimum ------------------------------------------------------------------------------------------


@given(
    history=st.lists(st.tuples(seconds, st.booleans()), max_size=12),
    hint_s=st.none() | seconds,
    duration_s=seconds,
    hold_cost_per_s=st.floats(0.01, 100),
    leave_cost=st.floats(0.01, 100),
    trust=st.floats(0.01, 1.0),
)
def test_no_history_hint_or_duration_costs_more_than_the_stated_worst_case(
    history: list[tuple[float, bool]],
    hint_s: float | None,
    duration_s: float,
    hold_cost_per_s: float,
    leave_cost: float,
    trust: float,
) -> None:
    estimator = HistoryEstimator(trust)
    for past_s, clean in history:
        estimator.observe("search", past_s, clean)
    estimator.started("call", "search", 0.0, hint_s)
    tau_s = estimator.hold_until_s("search", hold_cost_per_s, leave_cost, "call")
    for worst_s in (duration_s, math.nextafter(tau_s, math.inf), tau_s):  # returns just after we left
        optimum = min(hold_cost_per_s * worst_s, leave_cost)
        assert held_cost(tau_s, worst_s, hold_cost_per_s, leave_cost) <= (1 + 1 / trust) * optimum * (1 + 1e-9)


@given(duration_s=seconds, hold_cost_per_s=st.floats(0.01, 100), leave_cost=st.floats(0.01, 100))
def test_elapsed_costs_at_most_twice_the_optimum(duration_s: float, hold_cost_per_s: float, leave_cost: float) -> None:
    tau_s = ElapsedEstimator().hold_until_s("search", hold_cost_per_s, leave_cost)
    optimum = min(hold_cost_per_s * duration_s, leave_cost)
    assert held_cost(tau_s, duration_s, hold_cost_per_s, leave_cost) <= 2 * optimum * (1 + 1e-9)
