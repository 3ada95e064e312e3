"""Oracles that are wrong about how long calls last."""

import pytest

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.simulation import OracleEstimator
from studies.questions.estimates import WILD_TOOLS, WRONG_ORACLES, ScaledEstimator, one_tool_wrong

CALL = PendingCall("tool", "call", 6.0)


def distorted(factor: float, inner: Estimator | None = None) -> ScaledEstimator:
    estimator = ScaledEstimator(inner or OracleEstimator(), lambda call: factor)
    estimator.started(CALL, 0.0)
    return estimator


def test_a_wrong_oracle_is_wrong_by_its_factor_until_the_call_outlasts_it() -> None:
    tenfold, half = distorted(10.0), distorted(0.5)
    assert tenfold.remaining_s(CALL, 2.0) == 58.0
    assert half.remaining_s(CALL, 2.0) == 1.0
    assert half.remaining_s(CALL, 4.0) == 0.0


def test_a_factor_of_one_changes_nothing() -> None:
    oracle = OracleEstimator()
    same = distorted(1.0, oracle)
    for age_s in (0.0, 2.0, 7.0):
        assert same.remaining_s(CALL, age_s) == oracle.remaining_s(CALL, age_s)
    same.observe(CALL, 6.0)
    with pytest.raises(AssertionError, match="calls that have started"):
        same.remaining_s(CALL, 0.0)


def test_the_wild_oracle_draws_a_factor_for_every_call_and_keeps_it() -> None:
    wild = WRONG_ORACLES["oracle_wild"]()
    for number in range(200):
        wild.started(PendingCall("tool", number, 1.0), 0.0)
    durations = [wild.remaining_s(PendingCall("tool", number), 0.0) for number in range(200)]
    assert durations == [wild.remaining_s(PendingCall("tool", number), 0.0) for number in range(200)]
    assert 0.1 <= min(durations) < 0.13
    assert 8.0 < max(durations) <= 10.0


def test_an_oracle_that_is_wrong_about_one_tool_is_right_about_the_others() -> None:
    wrong = WRONG_ORACLES[one_tool_wrong("chat", 10.0)]()
    for name in ("chat", "qa"):
        wrong.started(PendingCall(name, name, 2.0), 0.0)
    assert [wrong.remaining_s(PendingCall(name, name), 0.0) for name in ("chat", "qa")] == [20.0, 2.0]


@pytest.mark.parametrize("name", WILD_TOOLS)
def test_each_tool_has_a_wrong_factor_of_its_own_for_all_its_calls(name: str) -> None:
    wild = WRONG_ORACLES[name]()
    calls = [PendingCall(tool, f"{tool}{number}", 1.0) for tool in ("chat", "qa", "ve") for number in range(2)]
    for call in calls:
        wild.started(call, 0.0)
    factors = [wild.remaining_s(call, 0.0) for call in calls]
    assert factors[::2] == factors[1::2]
    assert len(set(factors)) == 3
    assert all(0.1 <= factor <= 10.0 for factor in factors)
