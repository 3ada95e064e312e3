"""Estimators against knowing: what holding one context alone costs under each, and oracles that are wrong."""

from random import Random

import pytest

from jinfercept.sched.estimator import Estimator, HistoryEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.simulation import OracleEstimator
from studies.questions.estimates import WILD_TOOLS, WRONG_ORACLES, ScaledEstimator, one_tool_wrong
from tests.support.single_request import RULES, Rule, by_estimator, cost_over_optimum, held_cost

CALL = PendingCall("tool", "call", 6.0)
PROFILE = load_profile("paper-gptj-6b-a100")


def test_history_comes_close_to_knowing_and_the_fixed_rules_do_not() -> None:
    costs = {rule.name: cost_over_optimum(rule, lambda tokens: PROFILE.step_s(tokens, 0)) for rule in RULES}
    assert costs["always preserve"] == pytest.approx(9.8, rel=0.05)
    assert costs["always discard"] == pytest.approx(2.15, abs=0.02)
    assert costs["elapsed"] == pytest.approx(1.79, abs=0.02)
    assert costs["history, 3 calls seen"] == pytest.approx(1.07, abs=0.02)
    assert costs["history, 20 calls seen"] == pytest.approx(1.02, abs=0.02)


def test_a_tighter_worst_case_costs_more() -> None:
    rules = [Rule("", lambda trust=trust: HistoryEstimator(trust), by_estimator, 20) for trust in (1 / 64, 0.1, 0.5)]
    costs = [cost_over_optimum(rule, lambda tokens: PROFILE.step_s(tokens, 0), rounds=100) for rule in rules]
    assert costs == pytest.approx([1.03, 1.08, 1.40], abs=0.02)


def test_an_adversary_who_sees_how_long_is_held_gets_no_more_than_the_worst_case_round_after_round() -> None:
    """He returns right after we have left, or at once if that costs more; and teaches the history what he likes."""
    for trust in (1 / 64, 0.1, 1.0):
        estimator, rng = HistoryEstimator(trust), Random(0)
        cost = optimum = 0.0
        for number in range(300):
            hold_cost, leave_cost = 1.0, 10.0
            call = PendingCall("tool", number, rng.choice((None, 0.0, 5.0, 1e6)))
            estimator.started(call, 100.0 * number)
            tau_s = estimator.hold_until_s(call, hold_cost, leave_cost)
            options = (tau_s * (1 + 1e-9), tau_s, 1e-9, 1e9)
            duration_s = max(options, key=lambda x: held_cost(tau_s, x, hold_cost, leave_cost) / min(x, leave_cost))
            estimator.observe(call, duration_s, rng.random() < 0.5)
            cost += held_cost(tau_s, duration_s, hold_cost, leave_cost)
            optimum += min(hold_cost * duration_s, leave_cost)
        assert 1.0 < cost / optimum <= 1 + 1 / trust


def distorted(factor: float, inner: Estimator | None = None) -> ScaledEstimator:
    estimator = ScaledEstimator(inner or OracleEstimator(), lambda call: factor)
    estimator.started(CALL, 0.0)
    return estimator


def test_a_wrong_oracle_is_wrong_by_its_factor_until_the_call_outlasts_it() -> None:
    tenfold, half = distorted(10.0), distorted(0.5)
    assert tenfold.duration_s(CALL, 2.0) == 60.0
    assert tenfold.remaining_s(CALL, 2.0) == 58.0
    assert half.remaining_s(CALL, 2.0) == 1.0
    assert half.remaining_s(CALL, 4.0) == 0.0
    assert [half.survival(CALL, 1.0, horizon_s) for horizon_s in (1.9, 2.0)] == [1.0, 0.0]
    assert half.hold_until_s(CALL, 1.0, 4.0) == float("inf")
    assert tenfold.hold_until_s(CALL, 1.0, 59.0) == 0.0


def test_a_factor_of_one_changes_nothing() -> None:
    oracle = OracleEstimator()
    same = distorted(1.0, oracle)
    for age_s in (0.0, 2.0, 7.0):
        assert same.remaining_s(CALL, age_s) == oracle.remaining_s(CALL, age_s)
        assert same.survival(CALL, age_s, 1.0) == oracle.survival(CALL, age_s, 1.0)
    assert same.hold_until_s(CALL, 2.0, 11.0) == oracle.hold_until_s(CALL, 2.0, 11.0)
    same.observe(CALL, 6.0)
    with pytest.raises(AssertionError, match="calls that have started"):
        same.duration_s(CALL, 0.0)


def test_the_wild_oracle_draws_a_factor_for_every_call_and_keeps_it() -> None:
    wild = WRONG_ORACLES["oracle_wild"]()
    for number in range(200):
        wild.started(PendingCall("tool", number, 1.0), 0.0)
    durations = [wild.duration_s(PendingCall("tool", number), 0.0) for number in range(200)]
    assert durations == [wild.duration_s(PendingCall("tool", number), 0.0) for number in range(200)]
    assert 0.1 <= min(durations) < 0.13
    assert 8.0 < max(durations) <= 10.0


def test_an_oracle_that_is_wrong_about_one_tool_is_right_about_the_others() -> None:
    wrong = WRONG_ORACLES[one_tool_wrong("chat", 10.0)]()
    for name in ("chat", "qa"):
        wrong.started(PendingCall(name, name, 2.0), 0.0)
    assert [wrong.duration_s(PendingCall(name, name), 0.0) for name in ("chat", "qa")] == [20.0, 2.0]


@pytest.mark.parametrize("name", WILD_TOOLS)
def test_each_tool_has_a_wrong_factor_of_its_own_for_all_its_calls(name: str) -> None:
    wild = WRONG_ORACLES[name]()
    calls = [PendingCall(tool, f"{tool}{number}", 1.0) for tool in ("chat", "qa", "ve") for number in range(2)]
    for call in calls:
        wild.started(call, 0.0)
    factors = [wild.duration_s(call, 0.0) for call in calls]
    assert factors[::2] == factors[1::2]
    assert len(set(factors)) == 3
    assert all(0.1 <= factor <= 10.0 for factor in factors)
