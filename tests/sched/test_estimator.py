"""What estimators predict."""

import pickle
from collections.abc import Hashable

import pytest

from jinfercept.sched.estimator import MOST_IN_FLIGHT, MOST_TENANTS, ElapsedEstimator, HistoryEstimator
from jinfercept.sched.sequence import CallKind, PendingCall
from jinfercept.sim.simulation import OracleEstimator

SEARCH, PERSON = PendingCall("search"), PendingCall("person")


def taught(*durations: float) -> HistoryEstimator:
    """A history of the tool "search"."""
    estimator = HistoryEstimator()
    for duration_s in durations:
        estimator.observe(SEARCH, duration_s)
    return estimator


def test_elapsed_expects_as_much_again() -> None:
    estimator = ElapsedEstimator()
    assert estimator.remaining_s(SEARCH, 3.0) == 3.0


def test_a_call_that_outlasts_everything_known_is_expected_to_last_as_long_again() -> None:
    estimator = taught(1.0, 2.0, 6.0)
    assert estimator.remaining_s(SEARCH, 6.0) == 6.0
    assert estimator.remaining_s(SEARCH, 7.0) == 7.0


def test_tools_are_told_apart_and_a_new_one_starts_with_everybodys_history() -> None:
    estimator = taught(1.0, 3.0)
    estimator.observe(PERSON, 20.0)
    assert estimator.remaining_s(SEARCH, 0.0) == pytest.approx(2.0)
    assert estimator.remaining_s(PERSON, 0.0) == pytest.approx(20.0)
    painter = PendingCall("painter", "first")
    estimator.started(painter, 0.0)
    assert estimator.remaining_s(painter, 0.0) == pytest.approx(8.0)
    estimator.observe(painter, 5.0)
    assert estimator.remaining_s(painter, 0.0) == pytest.approx(5.0)


def test_with_nothing_known_history_is_elapsed() -> None:
    estimator = HistoryEstimator()
    estimator.started(SEARCH, 0.0)
    for age_s in (0.0, 4.0):
        assert estimator.remaining_s(SEARCH, age_s) == age_s


def test_calls_in_flight_count_for_at_least_their_age() -> None:
    estimator = taught(1.0, 1.0, 40.0)
    for index in range(9):
        estimator.started(PendingCall("search", index), 0.0)
    estimator.started(PendingCall("search", "last"), 30.0)
    assert estimator.remaining_s(SEARCH, 0.0) == pytest.approx((2 * 1 + 10 * 40) / 12)
    for index in range(9):
        estimator.observe(PendingCall("search", index), 30.0, clean=False)
    assert estimator.remaining_s(SEARCH, 0.0) == pytest.approx((2 * 1 + 10 * 40) / 12)


def test_a_tool_that_only_ever_times_out_is_expected_to_last_longer() -> None:
    clean, killed = HistoryEstimator(), HistoryEstimator()
    for _ in range(5):
        clean.observe(SEARCH, 3.0)
        killed.observe(SEARCH, 3.0, clean=False)
    assert clean.remaining_s(SEARCH, 2.0) == pytest.approx(1.0)
    assert killed.remaining_s(SEARCH, 2.0) == pytest.approx(6.0 + 2.0)


def test_a_hint_is_believed_until_the_call_outlasts_it() -> None:
    estimator = taught(1.0, 2.0, 40.0)
    render = PendingCall("search", "render", 10.0)
    estimator.started(render, 0.0)
    assert estimator.remaining_s(render, 4.0) == 6.0
    assert estimator.remaining_s(render, 12.0) == estimator.remaining_s(SEARCH, 12.0)


def test_the_oracle_knows() -> None:
    estimator = OracleEstimator()
    call = PendingCall("search", "call", 3.0)
    estimator.started(call, 5.0)
    assert estimator.remaining_s(call, 1.0) == 2.0
    assert estimator.remaining_s(call, 3.5) == 0.0  # its return is not read yet
    estimator.observe(call, 3.0)
    with pytest.raises(AssertionError, match="that have started"):
        estimator.remaining_s(call, 1.0)


# -- tenants -----------------------------------------------------------------------------------------------------------


def call_of(tenant: str, name: str = "search", kind: CallKind = "server_tool", key: Hashable = None) -> PendingCall:
    return PendingCall(name, key, tenant=tenant, kind=kind)


@pytest.mark.parametrize("kind", ["client_tool", "server_tool", "reader", "unknown_tool"])
def test_what_a_tenant_does_with_its_own_tools_and_answers_changes_nothing_for_another(kind: CallKind) -> None:
    estimator = HistoryEstimator()
    for number in range(100):
        estimator.started(call_of("hostile", kind=kind, key=number), 0.0)
        estimator.observe(call_of("hostile", kind=kind), 3600.0)
    polite = call_of("polite", kind=kind)
    assert estimator.remaining_s(polite, 2.0) == 2.0  # as with nothing known
    estimator.observe(polite, 5.0)
    assert estimator.remaining_s(polite, 2.0) == 3.0
    assert estimator.remaining_s(call_of("polite", "another", kind), 0.0) == 5.0  # the tenant's pooled history


def test_histories_are_bounded_and_a_tenants_names_push_out_only_its_own() -> None:
    estimator = HistoryEstimator()
    estimator.observe(call_of("polite"), 5.0)

    def flood(names: range) -> int:
        for number in names:
            call = call_of("hostile", f"tool-{number:06}", "client_tool", key=number)
            estimator.started(call, 0.0)
            estimator.observe(call, 1.0)
        return len(pickle.dumps(estimator))

    full = flood(range(1000))
    assert flood(range(1000, 5000)) == pytest.approx(full, rel=0.01)
    assert estimator.remaining_s(call_of("polite"), 0.0) == 5.0
    for number in range(MOST_TENANTS + 1):
        estimator.observe(call_of(f"tenant-{number:06}"), 1.0)
    full = len(pickle.dumps(estimator))
    for number in range(MOST_TENANTS + 1, 2000):
        estimator.observe(call_of(f"tenant-{number:06}"), 1.0)
    assert len(pickle.dumps(estimator)) == pytest.approx(full, rel=0.01)


def test_calls_that_never_end_are_forgotten_beyond_a_bound() -> None:
    estimator = taught(1.0)
    for number in range(MOST_IN_FLIGHT):
        estimator.started(PendingCall("search", number), 0.0)
    full = len(pickle.dumps(estimator))
    for number in range(MOST_IN_FLIGHT, 3 * MOST_IN_FLIGHT):
        estimator.started(PendingCall("search", number), 0.0)
    assert len(pickle.dumps(estimator)) == pytest.approx(full, rel=0.05)
    estimator.observe(PendingCall("search", 0), 3.0)
