"""Records of pauses, and checks of the equations on them: cases worked out by hand, and a crowd."""

from dataclasses import replace
from random import Random

import pytest

from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.named_profiles import PROFILES, load_profile
from jinfercept.sched.plan import StepResult
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence, State
from jinfercept.sched.waste import Waste, discard_waste
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.simulation import OracleEstimator, Simulation
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import Script, Segment, draw
from studies.pause_records import DecisionCase, PauseCost, PauseRecord, PauseRecords
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
from studies.questions.estimates import WILD_TOOLS, WRONG_ORACLES, ScaledEstimator, one_tool_wrong
from tests.support.fake_engine import AffineCost, FakeRunner

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


SIZE, SATURATION = 4, 16
COST = AffineCost(fixed_s=1.0, per_query_s=0.125, link_tokens_per_s=4.0)


class Desk:
    """A scheduler on pages of four tokens, a clock that is moved by hand and by steps, and the records of its pauses.

    Who does not swap synchronously moves less here than a step hides.
    """

    def __init__(self, policy: str, num_pages: int = 20) -> None:
        self.now = 0.0
        self.kv = KVManager(num_pages, num_pages, SIZE)
        inputs = PolicyInputs(COST, SATURATION, SIZE, OracleEstimator())
        made = inputs.make(policy)
        self.synchronous = made.synchronous
        self.events = RequestLog(lambda: self.now)
        self.records = PauseRecords(self.events, inputs, made.synchronous)
        self.scheduler = Scheduler(
            self.kv,
            made,
            COST,
            inputs.estimator,
            buckets=tuple(range(1, SATURATION + 1)),
            max_num_seqs=4,
            max_model_len=num_pages * SIZE,
            chunk_tokens=SATURATION,
        )
        self.scheduler.observe(self.events)
        self.runner = FakeRunner(SIZE, tuple(range(1, SATURATION + 1)))

    def step(self) -> None:
        """A plan; it takes a second, an eighth for each query token, and the time of synchronous transfers."""
        planned = self.scheduler.plan(self.now)
        if planned.plan:
            result = self.runner.submit(planned.plan)
            moved = len(planned.plan.offload) + len(planned.plan.fetch)
            elapsed_s = COST.step_s(planned.plan.num_tokens, 0) if planned.plan.chunks else 0.0
            elapsed_s += moved * SIZE / COST.link_tokens_per_s if self.synchronous else 0.0
            self.now += elapsed_s
            self.events.stepped(planned, StepResult(result.tokens, elapsed_s))
            for (sequence, *_), token in zip(planned.sampled, result.tokens, strict=True):
                self.scheduler.accept(sequence, token)

    def started(self, name: str, num_tokens: int) -> Sequence:
        """A sequence that has its first token."""
        sequence = Sequence(name, [len(name)] * num_tokens, self.kv.open(name), max_tokens=1000)
        self.scheduler.add(sequence)
        for _ in range(9):
            if not sequence.generated:
                self.step()
        assert sequence.generated
        return sequence

    def call(self, sequence: Sequence, seconds: float) -> None:
        self.scheduler.intercept(sequence, self.now, (PendingCall("tool", sequence.id, seconds),))

    def back(self, sequence: Sequence, clean: bool = True) -> None:
        duration_s = self.now - sequence.paused_s
        self.scheduler.resume(sequence, [7], (CallDuration(duration_s, clean),))

    def ended(self) -> list[PauseRecord]:
        self.records.close()
        return self.records.ended


def test_a_context_that_is_kept_costs_what_was_predicted() -> None:
    desk = Desk("preserve")
    sequence = desk.started("one", 10)
    desk.call(sequence, 3.0)
    desk.now += 3.0
    desk.back(sequence)
    desk.step()
    [record] = desk.ended()
    [(action, (case, waste))] = record.decided.items()
    assert (action, case.remaining_s, case.context, waste.preserve) == ("keep", 3.0, 10, 30.0)
    assert record.returned
    assert record.predicted_token_s == record.cost.token_s == 30.0
    assert record.cost == PauseCost(kept=30.0, recompute=0.0, fetch=0.0, stall=0.0, queued=0.0)


def test_a_context_that_is_dropped_costs_its_recomputation() -> None:
    desk = Desk("improved_discard")
    other = desk.started("other", 6)
    sequence = desk.started("one", 10)
    desk.call(sequence, 5.0)
    desk.step()
    desk.now = sequence.paused_s + 5.0
    desk.back(sequence)
    desk.step()
    [record] = desk.ended()
    [(action, (case, waste))] = record.decided.items()
    assert action == "drop from both places"
    chunks = [case.chunk] * (10 // case.chunk) + [10 % case.chunk]
    recompute = (1 + 10 / 8) * 10 / 2 + sum(tokens / 8 for tokens in chunks) * case.others
    assert waste == (50.0, recompute, 2 * (10 / 4) * case.others)
    assert record.predicted_token_s == recompute
    step_s = 1 + 13 / 8  # 10 tokens again, the one sampled last, the one returned, and the other's
    assert record.cost.recompute == pytest.approx(step_s * 12 + 10 / 8 * len(other.tokens))
    assert record.cost.kept == 0.0


def test_a_context_that_is_swapped_stalls_the_others_twice() -> None:
    desk = Desk("swap")
    desk.started("other", 6)
    sequence = desk.started("one", 8)
    desk.call(sequence, 5.0)
    desk.step()
    desk.back(sequence)
    desk.step()
    desk.step()
    [record] = desk.ended()
    [(action, (case, _))] = record.decided.items()
    assert action == "copy, then drop from the device"
    assert record.predicted_token_s == 2 * (8 / 4) * case.others
    assert record.cost.recompute == 0.0
    assert record.cost.fetch == (1 + 1 / 8) * 8  # it is there at the end of a step in which the other decoded
    out, back = case.others, case.others + 1 + 8
    assert record.cost.stall == pytest.approx(8 / 4 * (out + back))


def test_interceptions_that_never_return_are_recorded_and_preemptions_are_not() -> None:
    desk = Desk("preserve")
    for name in ("aborted", "open"):
        desk.call(desk.started(name, 10), 100.0)
    desk.step()
    desk.now += 2.0
    aborted = next(sequence for sequence in desk.scheduler.unfinished if sequence.id == "aborted")
    desk.scheduler.finish(aborted, desk.now)
    records = desk.ended()
    assert [(record.request, record.returned) for record in records] == [("aborted", False), ("open", False)]
    assert records[1].cost.kept == 20.0
    desk = Desk("improved_discard", num_pages=8)
    first, second = (desk.started(name, 8) for name in ("first", "second"))
    for _ in range(20):
        desk.step()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert desk.ended() == []


# -- a run of a crowd ----------------------------------------------------------------------------------------------------


SIMULATION = Simulation(
    PROFILES["paper-gptj-6b-a100"],
    "min_waste",
    "history",
    duration_s=15.0,
    kv_tokens=6144,
    host_tokens=4096,
    max_model_len=2100,
)


def crowd() -> list[Arrival]:
    rng = Random(1)
    return arrivals(lambda: draw("mixed", rng), 1.5, SIMULATION.duration_s, rng)


SLOW = [pytest.param(policy, depth, marks=pytest.mark.slow) for policy, depth in (("swap", 0), ("lru_host", 1))]


@pytest.mark.parametrize(("policy", "depth"), [("copy_ahead", 0), ("min_waste", 1), *SLOW])
def test_recording_changes_nothing_and_accounts_for_what_the_run_reports(policy: str, depth: int) -> None:
    simulation, opened = replace(SIMULATION, policy=policy, depth=depth), list[PauseRecords]()
    plain = simulation.run(crowd())
    watched = simulation.run(
        crowd(), watch=lambda log, _, inputs, stalls: opened.append(PauseRecords(log, inputs, stalls))
    )
    assert plain | {"sim_wall_s": 0} == watched | {"sim_wall_s": 0}
    opened[0].close()
    costs, waste = [record.cost for record in opened[0].ended], plain["waste_token_s"]
    stall = sum(cost.stall for cost in costs)
    assert stall <= 1.05 * waste["stall"]
    assert depth or stall >= 0.95 * waste["stall"] - 1.0
    held_token_s = sum(cost.kept + cost.queued for cost in costs)
    assert 0.95 * waste["preserve"] <= held_token_s <= 1.05 * waste["preserve"]


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
