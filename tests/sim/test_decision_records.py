"""What decision records say of small cases whose numbers can be worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.kv.manager import KVManager
from jinfercept.meter.request_log import RequestLog
from jinfercept.sched.estimator import ElapsedEstimator, HistoryEstimator
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.plan import StepResult
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, Pause, PendingCall, Sequence, State
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.decision_records import DecisionLog
from jinfercept.sim.forecast import QUANTILES, EstimatorTee, forecast
from jinfercept.sim.oracle import OracleEstimator
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import draw
from studies.calls.formulas import priced
from studies.calls.markup import CallArrival
from studies.calls.scripts import CallScript, ScriptedCall
from tests.support.fake_engine import AffineCost, FakeRunner

SIZE, SATURATION = 4, 16
COST = AffineCost(fixed_s=1.0, per_query_s=0.125, link_tokens_per_s=4.0)


class Desk:
    """A scheduler on pages of four tokens, a clock that is moved by hand and by steps, and the log of what was done.

    Who does not swap synchronously moves less here than a step hides.
    """

    def __init__(self, path: Path, policy: str, num_pages: int = 20) -> None:
        self.path, self.now = path, 0.0
        self.kv = KVManager(num_pages, num_pages, SIZE)
        inputs = PolicyInputs(COST, SATURATION, SIZE, OracleEstimator())
        made = inputs.make(policy)
        self.synchronous = made.synchronous
        self.log = DecisionLog(
            path, lambda: self.now, inputs, OracleEstimator(), synchronous=made.synchronous, run={"policy": "a"}
        )
        self.events = RequestLog(lambda: self.now)
        self.events.tell(self.log.fold)
        self.scheduler = Scheduler(
            self.kv,
            made,
            COST,
            self.log.estimator,
            buckets=tuple(range(1, SATURATION + 1)),
            max_num_seqs=4,
            max_model_len=num_pages * SIZE,
            chunk_tokens=SATURATION,
            observer=self.events,
        )
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

    def lines(self, kind: str) -> list[dict[str, Any]]:
        self.log.close()
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        assert lines[0] == lines[0] | {"type": "run", "policy": "a"}
        return [line for line in lines if line["type"] == kind]


def test_a_context_that_is_kept_costs_what_was_predicted(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "preserve")
    sequence = desk.started("one", 10)
    desk.call(sequence, 3.0)
    desk.now += 3.0
    desk.back(sequence)
    desk.step()
    [decision], [outcome] = desk.lines("decision"), desk.lines("outcome")
    assert decision["action"] == "keep"
    assert decision["remaining_s"] == 3.0
    assert decision["context"] == 10
    assert decision["waste"]["preserve"] == 30.0
    assert outcome["call_s"] == outcome["duration_s"] == 3.0
    assert outcome["predicted_token_s"] == outcome["actual_token_s"] == 30.0
    assert outcome["actual"] == {"held": 30.0, "recompute": 0.0, "fetch": 0.0, "stall": 0.0, "queued": 0.0}


def test_a_context_that_is_dropped_costs_its_recomputation(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "improved_discard")
    other = desk.started("other", 6)
    sequence = desk.started("one", 10)
    desk.call(sequence, 5.0)
    desk.step()
    desk.now = sequence.paused_s + 5.0
    desk.back(sequence)
    desk.step()
    [decision], [outcome] = desk.lines("decision"), desk.lines("outcome")
    others = decision["others"]
    assert decision["action"] == "drop from both places"
    assert (decision["pages"], decision["tokens"], decision["lost_tokens"], decision["copied_tokens"]) == (3, 10, 10, 0)
    chunks = [decision["chunk"]] * (10 // decision["chunk"]) + [10 % decision["chunk"]]
    recompute = (1 + 10 / 8) * 10 / 2 + sum(tokens / 8 for tokens in chunks) * others
    assert decision["waste"] == {"preserve": 50.0, "discard": recompute, "swap": 2 * (10 / 4) * others}
    assert outcome["predicted_token_s"] == recompute
    assert outcome["recomputed_tokens"] == 10
    step_s = 1 + 13 / 8  # 10 tokens again, the one sampled last, the one returned, and the other's
    assert outcome["actual"]["recompute"] == pytest.approx(step_s * 12 + 10 / 8 * len(other.tokens))
    assert outcome["actual"]["held"] == 0.0


def test_a_context_that_is_swapped_stalls_the_others_twice(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "swap")
    desk.started("other", 6)
    sequence = desk.started("one", 8)
    desk.call(sequence, 5.0)
    desk.step()
    desk.back(sequence)
    desk.step()
    desk.step()
    [decision], [outcome] = desk.lines("decision"), desk.lines("outcome")
    assert (decision["action"], decision["copied_tokens"], decision["freed_tokens"]) == (
        "copy, then drop from the device",
        8,
        8,
    )
    assert outcome["found"] == {"device": 0, "host": 8, "missing": 0}
    assert outcome["actual"]["recompute"] == 0.0
    assert outcome["predicted_token_s"] == 2 * (8 / 4) * decision["others"]
    assert outcome["actual"]["fetch"] == (1 + 1 / 8) * 8  # it is there at the end of a step in which the other decoded
    out, back = decision["others"], decision["others"] + 1 + 8
    assert outcome["actual"]["stall"] == pytest.approx(8 / 4 * (out + back))


def test_moves_for_one_reason_in_one_plan_are_one_decision_for_each_context(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "improved_discard")
    desk.started("other", 6)
    sequences = [desk.started(name, 12) for name in ("one", "two")]
    for sequence in sequences:
        desk.call(sequence, 1000.0)
    desk.step()
    first, second = desk.lines("decision")
    assert [first["request"], second["request"]] == ["one", "two"]
    assert first["plan"] == second["plan"]
    assert [first["pages"], second["pages"]] == [4, 3]  # the first has decoded beside the second's start


def test_an_interception_that_never_returns_has_an_outcome_without_an_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "preserve")
    for name in ("aborted", "open"):
        desk.call(desk.started(name, 10), 100.0)
    desk.step()
    desk.now += 2.0
    aborted = next(sequence for sequence in desk.scheduler.unfinished if sequence.id == "aborted")
    desk.scheduler.finish(aborted, desk.now)
    first, second = desk.lines("outcome")
    assert (first["request"], second["request"]) == ("aborted", "open")
    assert [first["returned"], second["returned"], first["call_s"]] == [False, False, None]
    assert second["actual"]["held"] == 20.0


def test_how_long_a_call_that_was_given_up_would_have_lasted_is_not_known(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "preserve")
    sequence = desk.started("one", 10)
    desk.call(sequence, 100.0)
    desk.now += 2.0
    desk.back(sequence, clean=False)
    desk.step()
    [outcome] = desk.lines("outcome")
    assert outcome["returned"]
    assert outcome["duration_s"] == 2.0
    assert outcome["call_s"] is None


def test_a_preempted_sequence_has_decisions_and_no_outcome(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "improved_discard", num_pages=8)
    first, second = (desk.started(name, 8) for name in ("first", "second"))
    for _ in range(20):
        desk.step()
    assert (first.preemptions, second.preemptions) == (0, 1)
    [decision] = desk.lines("decision")
    assert (decision["request"], decision["state"], decision["interception"]) == ("second", "waiting", 0)
    assert decision["remaining_s"] is decision["waste"]["preserve"] is None
    assert desk.lines("outcome") == []


def test_a_pause_is_forecast_again_as_it_grows_older(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "preserve")
    desk.started("other", 4)
    sequence = desk.started("one", 10)
    desk.call(sequence, 12.0)
    while desk.now < sequence.paused_s + 12.0:
        desk.step()
    desk.back(sequence)
    desk.step()
    [outcome] = desk.lines("outcome")
    ages = [prediction["age_s"] for prediction in outcome["forecasts"]]
    assert ages[0] == 0.0
    assert [any(due <= age < due + 1.2 for age in ages) for due in (1.0, 3.0, 10.0)] == [True] * 3
    for prediction in outcome["forecasts"]:
        assert prediction["remaining_s"] == pytest.approx(12.0 - prediction["age_s"], abs=1e-5)
        assert prediction["quantiles_s"] == pytest.approx([12.0 - prediction["age_s"]] * len(QUANTILES), rel=0.01)


def test_nothing_of_a_finished_request_is_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "log", "improved_discard")
    for number in range(5):
        sequence = desk.started(f"{number}", 10)
        desk.call(sequence, 1.0)
        desk.step()
        desk.now += 50.0
        desk.back(sequence)
        desk.step()
        desk.step()
        desk.scheduler.finish(sequence, desk.now)
        assert sequence.state is State.FINISHED
    desk.started("last", 2)
    containers = {name: value for name, value in vars(desk.log).items() if isinstance(value, dict | list)}
    assert {name for name, value in containers.items() if value} <= {"_running"}
    assert len(containers["_running"]) == 1


def test_quantiles_are_those_of_the_estimators_distribution() -> None:
    sequence = Sequence("one", [1], KVManager(2, 0, 4).open(), max_tokens=1)
    sequence.pause = Pause(0.0, *2 * ((PendingCall("tool", 0),),))
    prediction = forecast(ElapsedEstimator(), sequence, 10.0)
    assert prediction.remaining_s == 10.0
    pareto = [10.0 * ((1.0 - quantile) ** -0.5 - 1.0) for quantile in QUANTILES]
    assert prediction.quantiles_s == pytest.approx(pareto, rel=0.006)
    assert forecast(ElapsedEstimator(), sequence, 0.0).quantiles_s == (0.0,) * len(QUANTILES)


def test_the_last_of_several_calls_is_forecast() -> None:
    sequence = Sequence("one", [1], KVManager(2, 0, 4).open(), max_tokens=1)
    sequence.pause = Pause(0.0, *2 * ((PendingCall("tool", 0), PendingCall("tool", 1)),))
    estimator = HistoryEstimator()
    for seconds in range(1, 101):
        estimator.observe(PendingCall("tool"), float(seconds))
    [*_, high] = forecast(estimator, sequence, 0.0).quantiles_s
    assert high == pytest.approx(100 * 0.9**0.5, abs=1.1)


def test_an_estimator_tee_answers_as_its_primary_and_forwards_to_both() -> None:
    primary, secondary = HistoryEstimator(), HistoryEstimator()
    tee = EstimatorTee(primary, secondary)
    call = PendingCall("tool", "key")
    tee.started(call, 0.0)
    tee.keep(["key"])
    assert tee.take_ended("key") is None
    tee.keep(["key"])
    tee.observe(call, 4.0)
    for estimator in (tee, primary, secondary):
        assert estimator.remaining_s(call, 1.0) == estimator.duration_s(call, 1.0) - 1.0 == 3.0
        assert estimator.survival(call, 1.0, 2.0) == 1.0
        assert estimator.hold_until_s(call, 1.0, 100.0) == primary.hold_until_s(call, 1.0, 100.0)
    assert tee.take_ended("key") == CallDuration(4.0, True)
    tee.observe(call, 4.0)
    assert tee.take_ended("key") is None


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a record cannot be written"):
        Desk(tmp_path / "no such folder" / "log", "preserve")


def test_a_trap_of_several_calls_is_forecast_from_the_age_of_each(tmp_path: Path) -> None:
    """The elapsed estimator's survival is `(a / (a + t))²`; a trap lasts longer than `t` with `1 − Π(1 − (aᵢ / (aᵢ + t))²)`."""
    machine, path = PROFILES["paper-gptj-6b-a100"], tmp_path / "log"
    durations_s = (0.1, 3.0, 2.0, 2.5)  # the first has returned before the trap
    script = CallScript(16, (tuple(ScriptedCall("heavy", 40, seconds, 4, prose=10) for seconds in durations_s),))
    run = Simulation(machine, "preserve", "elapsed", duration_s=10.0, kv_tokens=2560)
    run.run([CallArrival(0.0, script)], decisions=str(path))
    [outcome] = [line for line in map(json.loads, path.read_text().splitlines()) if line["type"] == "outcome"]
    written = priced(script, machine)
    [written_round] = script.written_rounds()
    [_, *waited] = [(seconds, written(written_round.trap) - written(end)) for end, seconds in written_round.calls]
    assert outcome["tools"] == ["heavy"] * 3
    assert outcome["returned"]
    assert outcome["call_s"] == pytest.approx(max(seconds - age_s for seconds, age_s in waited), abs=0.02)
    assert outcome["duration_s"] == pytest.approx(outcome["call_s"], abs=1e-5)
    interrupt_tokens = 12  # of the first
    assert outcome["context"] == 16 + written_round.trap - 1 + interrupt_tokens  # without the token drawn last
    [first, *_] = outcome["forecasts"]
    for quantile, rest_s in zip(QUANTILES, first["quantiles_s"], strict=True):
        returned = [1 - (age_s / (age_s + rest_s)) ** 2 for _, age_s in waited]
        assert math.prod(returned) == pytest.approx(quantile, abs=0.01)
    assert outcome["predicted_token_s"] == pytest.approx(first["remaining_s"] * outcome["context"], rel=1e-4)
    assert outcome["actual"]["held"] == pytest.approx(outcome["duration_s"] * outcome["context"], rel=1e-4)


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
def test_recording_changes_nothing_and_accounts_for_what_the_run_reports(
    policy: str, depth: int, tmp_path: Path
) -> None:
    simulation, path = replace(SIMULATION, policy=policy, depth=depth), tmp_path / "log"
    plain = simulation.run(crowd())
    recorded = simulation.run(crowd(), decisions=str(path))
    assert plain | {"sim_wall_s": 0} == recorded | {"sim_wall_s": 0}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    choices = [line for line in lines if line["type"] == "decision"]
    assert sum(line["copied_tokens"] for line in choices if "copied_tokens" in line) == plain["copied_out_tokens"]
    parts = [line["actual"] for line in lines if line["type"] == "outcome"]
    waste = plain["waste_token_s"]
    stall = sum(part["stall"] for part in parts)
    assert stall <= 1.05 * waste["stall"]
    assert depth or stall >= 0.95 * waste["stall"] - 1.0
    held_token_s = sum(part["held"] + part["queued"] for part in parts)
    assert 0.95 * waste["preserve"] <= held_token_s <= 1.05 * waste["preserve"]


def test_files_under_other_names_than_asked_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--workload", "math", "--duration", "2", "--policy", "lru,swap", "--jobs", "1"]
    assert main(["simulate", *flags, "--decisions", "d.jsonl"]) == 0
    shown = capsys.readouterr().err.splitlines()
    names = {line.removeprefix("written: ") for line in shown if line.startswith("written: ")}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2
