"""The waste equations against records: hand-made lines, runs that do what one equation prices, and chunks."""

import json
from pathlib import Path

import pytest

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.waste import discard_waste
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import Script, Segment
from studies.questions.chunk_sizes import ChunkCell, cost_of
from studies.questions.equation_checks import EQUATIONS, Equation, EquationCheck, check_equation, ratio_of_sums, ratios

GPTJ = load_profile("paper-gptj-6b-a100")


def test_the_first_decision_that_does_what_an_equation_prices_is_compared_with_what_came(tmp_path: Path) -> None:
    waste = {"preserve": 4.0, "discard": 6.0, "swap": 8.0}
    decided = {
        "type": "decision",
        "request": "0",
        "interception": 1,
        "state": "intercepted",
        "context": 100,
        "others": 50,
    }
    ended = {"type": "outcome", "request": "0", "interception": 1, "actual_token_s": 12.0, "predicted_token_s": 3.0}
    lines = [
        {"type": "run"},
        decided | {"action": "copy", "waste": {}},
        decided | {"action": "drop from both places", "waste": waste},
        decided | {"action": "drop from both places", "waste": {}},
        ended | {"returned": True},
        ended | {"interception": 2, "returned": False},
    ]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    checks = {equation.number: check_equation(equation, path, GPTJ) for equation in EQUATIONS}
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


def alone(equation: Equation, path: Path) -> EquationCheck:
    """A context of 1,005 tokens whose call lasts 2 s and returns 4, and nothing else."""
    script = Script("chat", 1000, (Segment(5, 2.0, 4), Segment(5, None, 0)))
    Simulation(GPTJ, equation.policy, "oracle", 10.0).run([Arrival(0.0, script)], decisions=str(path))
    [check] = check_equation(equation, path, GPTJ)
    return check


def test_a_lonely_context_wastes_what_equations_1_and_2_predict(tmp_path: Path) -> None:
    at_once, keep = (alone(equation, tmp_path / "log") for equation in EQUATIONS[:2])
    assert at_once.actual == pytest.approx(at_once.predicted, rel=0.01)
    assert at_once.predicted == pytest.approx(GPTJ.step_s(1004, 0) * 1004, rel=0.01)
    assert keep.actual == pytest.approx(keep.predicted, rel=1e-6)


def test_a_lonely_context_in_chunks_wastes_more_than_equation_4_since_every_step_has_its_fixed_cost(
    tmp_path: Path,
) -> None:
    chunked = alone(EQUATIONS[3], tmp_path / "log")
    computed, actual = 0, 0.0
    for tokens in (384, 384, 241):
        computed += tokens
        actual += GPTJ.step_s(tokens, 0) * computed
    assert chunked.actual == pytest.approx(actual, rel=0.01)
    assert chunked.predicted == pytest.approx(GPTJ.step_s(1004, 0) * 1004 / 2, rel=0.01)


def test_recomputing_in_chunks_delays_as_the_profile_prices_it(tmp_path: Path) -> None:
    """The batch waits for the growth of every step; the request for the steps, of which the last computes its token too."""
    cell, path = ChunkCell(GPTJ, 512, 128), tmp_path / "log"
    dropped, kept = cell.runs(128, path)
    reports = [run.labels | run.simulation.run(run.load.arrivals, decisions=run.decisions) for run in (dropped, kept)]
    cost = cost_of(cell, reports, path)
    assert cost.others_s == pytest.approx(512 * GPTJ.per_query_s, rel=0.01)
    steps_s = 512 / 128 * GPTJ.step_s(128 + 32, 0)
    assert cost.own_s == pytest.approx(steps_s, rel=0.02)
    assert cost.waste.actual == pytest.approx(cost.waste.predicted, rel=0.1)
