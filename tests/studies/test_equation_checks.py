"""The waste equations against records: hand-made ones, runs that do what one equation prices, and chunks."""

import pytest

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policy import Action
from jinfercept.sched.sequence import State
from jinfercept.sched.waste import Waste, discard_waste
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import Script, Segment
from studies.pause_records import DecisionCase, PauseCost, PauseRecord
from studies.questions.chunk_sizes import ChunkCell, cost_of
from studies.questions.equation_checks import (
    CHECKS,
    EQUATIONS,
    Equation,
    EquationCheck,
    RecordedRun,
    check_equation,
    ratio_of_sums,
    ratios,
)

GPTJ = load_profile("paper-gptj-6b-a100")


def test_the_first_decision_that_does_what_an_equation_prices_is_compared_with_what_came() -> None:
    case = DecisionCase(0.0, State.INTERCEPTED, 1.0, 100, 50, 16)
    decided = {"copy": (case, Waste(0, 0, 0)), Action.DROP.value: (case, Waste(preserve=4.0, discard=6.0, swap=8.0))}
    ended = PauseRecord("0", True, decided, 3.0, PauseCost(5.0, 7.0, 0.0, 0.0, 99.0))
    records = [ended, ended._replace(returned=False)]
    checks = {equation.number: check_equation(equation, records, GPTJ) for equation in EQUATIONS}
    at_once = discard_waste(100, 50, lambda tokens: GPTJ.step_s(tokens, 0))
    assert checks == {
        1: [EquationCheck(at_once, 12.0)],
        2: [],
        3: [],
        4: [EquationCheck(6.0, 12.0)],
        5: [EquationCheck(3.0, 12.0)],
    }


def test_ratios_leave_out_what_was_predicted_to_waste_nothing() -> None:
    checks = [EquationCheck(2.0, 4.0), EquationCheck(0.0, 1.0), EquationCheck(3.0, 3.0)]
    assert ratio_of_sums(checks) == pytest.approx(8.0 / 5.0)
    assert ratios(checks)["mean"] == pytest.approx(1.5)
    assert ratio_of_sums(checks[1:2]) is None


def alone(equation: Equation) -> EquationCheck:
    """A context of 1,005 tokens whose call lasts 2 s and returns 4, and nothing else."""
    script = Script("chat", 1000, (Segment(5, 2.0, 4), Segment(5, None, 0)))
    load = SimulatedLoad("chat", 1.0, 0, [Arrival(0.0, script)])
    [check] = RecordedRun(Simulation(GPTJ, equation.policy, "oracle", 10.0), load, equation).play()[CHECKS]
    return check


def test_a_lonely_context_wastes_what_equations_1_and_2_predict() -> None:
    at_once, keep = (alone(equation) for equation in EQUATIONS[:2])
    assert at_once.actual == pytest.approx(at_once.predicted, rel=0.01)
    assert at_once.predicted == pytest.approx(GPTJ.step_s(1004, 0) * 1004, rel=0.01)
    assert keep.actual == pytest.approx(keep.predicted, rel=1e-6)


def test_a_lonely_context_in_chunks_wastes_more_than_equation_4_since_every_step_has_its_fixed_cost() -> None:
    chunked = alone(EQUATIONS[3])
    computed, actual = 0, 0.0
    for tokens in (384, 384, 241):
        computed += tokens
        actual += GPTJ.step_s(tokens, 0) * computed
    assert chunked.actual == pytest.approx(actual, rel=0.01)
    assert chunked.predicted == pytest.approx(GPTJ.step_s(1004, 0) * 1004 / 2, rel=0.01)


def test_recomputing_in_chunks_delays_as_the_profile_prices_it() -> None:
    """The batch waits for the growth of every step; the request for the steps, of which the last computes its token too."""
    cell = ChunkCell(GPTJ, 512, 128)
    cost = cost_of(cell, [run.play() for run in cell.runs(128)])
    assert cost.others_s == pytest.approx(512 * GPTJ.per_query_s, rel=0.01)
    steps_s = 512 / 128 * GPTJ.step_s(128 + 32, 0)
    assert cost.own_s == pytest.approx(steps_s, rel=0.02)
    assert cost.waste.actual == pytest.approx(cost.waste.predicted, rel=0.1)
