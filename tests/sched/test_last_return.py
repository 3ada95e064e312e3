"""When the last of several asynchronous calls returns, from the durations of their tools."""

import math

import pytest

from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import HistoryEstimator, remaining_s, survival
from jinfercept.sched.sequence import PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator


def waiting(*calls: PendingCall) -> Sequence:
    sequence = Sequence("s", [1], KVManager(4, 0, 4).open(), max_tokens=1)
    sequence.calls = sequence.awaited = calls
    return sequence


def taught(durations: dict[str, list[float]]) -> HistoryEstimator:
    estimator = HistoryEstimator()
    for name, seconds in durations.items():
        for number, duration_s in enumerate(seconds):
            estimator.observe(PendingCall(name, (name, number)), duration_s)
    return estimator


def test_survival_is_that_of_the_last_return_by_the_ages_of_the_calls() -> None:
    estimator = taught({"search": [1.0, 2.0, 3.0, 4.0], "sum": [2.0, 6.0]})
    calls = PendingCall("search", 1, head_start_s=1.5), PendingCall("sum", 2, head_start_s=0.5)
    for age_s, horizon_s in ((0.0, 1.0), (0.0, 2.0), (1.0, 1.0), (1.0, 3.0)):
        product = 1.0
        for call in calls:
            product *= 1.0 - estimator.survival(call, age_s + call.head_start_s, horizon_s)
        assert survival(estimator, waiting(*calls), age_s, horizon_s) == pytest.approx(1.0 - product)
    assert survival(estimator, waiting(*calls), 0.0, 1.0) == pytest.approx(1.0 - (1.0 - 2 / 3) * (1.0 - 1.0))


def test_the_expected_rest_is_at_least_that_of_the_slowest_call_and_grows_with_their_number() -> None:
    estimator = taught({"search": [-math.log(1 - (i + 0.5) / 200) for i in range(200)]})  # exponential, mean 1
    rests = []
    for count in (1, 2, 4, 8):
        calls = [PendingCall("search", i, head_start_s=0.01) for i in range(count)]
        rests.append(remaining_s(estimator, waiting(*calls), 0.0))
    harmonic = [sum(1 / k for k in range(1, count + 1)) for count in (1, 2, 4, 8)]
    assert rests == pytest.approx(harmonic, rel=0.06)


def test_a_call_that_has_returned_is_waited_for_no_more() -> None:
    oracle = OracleEstimator()
    calls = [PendingCall("t", i, expected_s=seconds, head_start_s=1.0) for i, seconds in enumerate((3.0, 9.0))]
    for call in calls:
        oracle.started(call, 0.0)
    sequence = waiting(*calls)
    assert remaining_s(oracle, sequence, 0.5) == pytest.approx(7.5)
    sequence.awaited = (calls[0],)
    assert remaining_s(oracle, sequence, 0.5) == 1.5
    assert [survival(oracle, sequence, 0.5, horizon_s) for horizon_s in (1.4, 1.6)] == [1.0, 0.0]
