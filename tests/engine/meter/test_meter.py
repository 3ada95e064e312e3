"""What is counted of an engine agrees with what its requests say of themselves, under every policy."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from jinfercept.calls import Call
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.counts import LIMITS, Histogram
from jinfercept.engine.meter.engine_stats import HISTORY_S, UNKNOWN, EngineStats
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.engine.session import MAX_NAME
from jinfercept.engine.state import live_state
from jinfercept.events import Finished
from jinfercept.kv.manager import KVManager
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import HistoryEstimator
from jinfercept.sched.plan import StepResult
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits
from tests.support.engine_requests import request, tokens_in
from tests.support.fake_engine import (
    AffineCost,
    FakeRunner,
    InstantDispatcher,
    ManualClock,
    sampled_depths,
    sampled_names,
)

SIZE = 4
COST = AffineCost(link_tokens_per_s=2_000.0)


@dataclass
class World:
    """An engine on a fake runner, with its meter."""

    engine: Engine
    meter: EngineStats
    clock: ManualClock
    log: RequestLog
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def step(self) -> None:
        events = self.engine.step()
        self.outputs |= {event.request_id: event.output for event in events if isinstance(event, Finished)}

    def serve(self, *requests: Request) -> None:
        for submitted in requests:
            self.engine.submit(submitted)
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it hangs")


class TimedRunner(FakeRunner):
    """Its steps take a moment."""

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket._replace(elapsed_s=0.01)


def number(histogram: Histogram) -> int:
    """The number of its values."""
    return histogram.cumulative[-1][1]


def world(
    name: str, *, num_pages: int = 24, depth: int = 1, latency: Callable[[Call], float] = lambda call: 0.5
) -> World:
    kv, clock, estimator = KVManager(num_pages, 40, SIZE), ManualClock(), HistoryEstimator()
    inputs = PolicyInputs(COST, 16, SIZE, estimator)
    policy = inputs.make(name)
    log = RequestLog(clock.now)
    meter = EngineStats(log, kv, inputs, synchronous=policy.synchronous)
    limits = SchedulerLimits((4, 16), max_num_seqs=4, max_model_len=num_pages * SIZE)
    scheduler = Scheduler(kv, policy, COST, estimator, limits)
    dispatcher = InstantDispatcher(clock, latency, lambda call: replace(tokens_in(call), duration_s=latency(call)))
    runner, wake = TimedRunner(SIZE, (4, 16)), threading.Event()
    requests = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=97)
    engine = Engine(requests, runner, wake, depth=depth, check=True)
    engine.observe(log)
    return World(engine, meter, clock, log)


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + index * index) % 97 for index in range(length)]


@pytest.mark.parametrize(("name", "depth"), sampled_depths())
def test_the_counts_are_the_sums_of_what_requests_say(name: str, depth: int) -> None:
    metered = world(name, depth=depth)
    metered.serve(*[request(f"r{i}", prompt(i, 9 + 5 * i), 10, {3: [1, 2, 3], 6: [4] * 6}) for i in range(6)])
    counts, outputs = metered.meter.read(), metered.outputs.values()
    completions = [output.outputs[0] for output in outputs]
    pauses = [pause for completion in completions for pause in completion.interceptions]
    assert len(pauses) == 12
    assert all(
        output.metrics.arrival_s < pause.began_s <= output.metrics.finished_s
        for output in outputs
        for pause in output.outputs[0].interceptions
    )
    assert counts.generated == sum(completion.num_generated for completion in completions) == 60
    assert counts.prompt == sum(len(output.prompt_token_ids) for output in outputs)
    assert counts.cached == sum(output.num_cached_tokens for output in outputs)
    assert dict(counts.finished) == {"length": 6}
    assert number(counts.first_token_s) == number(counts.request_s) == number(counts.decode_s) == 6
    assert number(counts.token_s) == 60 - 6 - 12  # a first token, and one after each pause, have none before them
    assert sum(counts.steps.values()) == metered.engine.scheduler.counters.plans
    [tool] = counts.tools.values()
    assert (tool.begun, tool.given_up, number(tool.duration_s), number(tool.resume_s)) == (12, 0, 12, 12)
    assert dict(tool.results) == {"ok": 12}
    assert counts.turns.total() == number(counts.turn_delay_s) == 6 + 12
    delays_s = [pause.delay_s or 0.0 for pause in pauses]
    assert tool.resume_s.total == pytest.approx(sum(delays_s), abs=0.01 * 12)
    assert counts.turn_delay_s.total == pytest.approx(counts.first_token_s.total + tool.resume_s.total)
    contexts = [pause.context for pause in pauses if pause.context]
    assert (tool.kept, tool.copied_in, tool.recomputed) == tuple(map(sum, zip(*contexts, strict=True)))
    assert tool.duration_s.total == pytest.approx(sum(pause.duration_s for pause in pauses), rel=0.05)
    counters = metered.engine.scheduler.counters
    assert counts.copied_in >= counters.copied_in
    assert counts.copied_out >= counters.copied_out
    assert (counts.waste.recompute > 0) == (counters.recomputed > 0)


def test_a_context_that_is_preserved_wastes_its_tokens_for_as_long_as_it_is_paused() -> None:
    metered = world("preserve", latency=lambda call: 20.0)
    metered.serve(request("a", prompt(1, 15), 4, {1: [5]}))
    assert metered.meter.read().waste.preserve == pytest.approx(4 * SIZE * 20.0, rel=0.02)  # four pages hold 16 tokens


def test_the_error_of_an_estimate_is_what_was_expected_at_the_pause_against_what_it_took() -> None:
    metered = world("copy_ahead", latency=lambda call: 3.0)
    metered.serve(request("a", prompt(1, 9), 4, {1: [5]}))
    tool = metered.meter.read().tools["tool"]
    assert (tool.predicted_s, tool.error_s) == (0.0, pytest.approx(3.0, rel=0.01))  # nothing was known yet
    metered.serve(request("b", prompt(2, 9), 4, {1: [5]}))
    tool = metered.meter.read().tools["tool"]
    assert tool.predicted_s == pytest.approx(3.0, rel=0.01)
    assert tool.error_s == pytest.approx(3.0, rel=0.02)


def ask(name: str, tokens: list[int], session: str) -> Request:
    return Request(name, tuple(tokens), SamplingParams(max_tokens=5, temperature=0), follow_up=FollowUp(session))


@pytest.mark.parametrize("name", sampled_names())
def test_the_history_of_the_pool_has_a_sample_a_second_and_every_page_in_each(name: str) -> None:
    metered = world(name, latency=lambda call: 2.0)
    metered.serve(*[request(f"r{i}", prompt(i, 20), 30, {3: [1, 2], 9: [3]}) for i in range(20)])
    seconds = [int(sample.at_s) for sample in metered.meter.history]
    assert seconds == sorted(set(seconds))
    assert 3 < len(seconds) <= HISTORY_S
    assert {sum(sample.pages[:5]) for sample in metered.meter.history} == {24}
    assert {sample.pages.host + sample.pages.host_free for sample in metered.meter.history} == {40}
    assert metered.meter.history[-1].pages.used == 0


def test_decisions_are_one_for_each_context_and_reason() -> None:
    metered = world("copy_ahead", latency=lambda call: 2.0)
    metered.serve(*[request(f"r{i}", prompt(i, 30), 10, {3: [1, 2]}) for i in range(6)])
    decisions = list(metered.meter.decisions)
    assert {decided.why for decided in decisions} >= {"write-through", "least recently used"}
    assert sum(decided.copied_tokens for decided in decisions) <= metered.meter.counts.copied_out
    assert sum(decided.freed_pages for decided in decisions) > 0
    assert {decided.tool for decided in decisions} == {"tool", ""}, "no tool where a request still runs"
    assert sum(metered.meter.counts.moved_pages.values()) > len(decisions)


def test_how_long_one_tenants_readers_take_is_not_expected_of_anothers_but_counts_for_itself() -> None:
    metered = world("copy_ahead")
    for name, tenant in (("a", "slow"), ("b", "slow"), ("c", "other")):
        metered.serve(replace(ask(name, prompt(1, 12), f"session of {tenant}"), tenant=tenant, cache_salt=tenant))
        metered.clock.time += 1000.0 if name == "a" else 0.0
    rows = {row["request"]: row for row in live_state(metered.meter, texts=False)["retained"]}
    assert rows["b"]["remaining_s"] == pytest.approx(1000.0, rel=0.01)
    assert rows["c"]["remaining_s"] == rows["c"]["age_s"]  # nothing is known: as long again
    tool = metered.meter.read().tools[FollowUp().reader]
    assert (tool.begun, tool.predicted_s) == (3, 0.0)
    metered.serve(replace(ask("d", prompt(1, 12), "session of slow"), tenant="slow", cache_salt="slow"))
    assert metered.meter.read().tools[FollowUp().reader].predicted_s == pytest.approx(1000.0, rel=0.01)


def test_a_name_that_no_tool_has_is_counted_under_a_fixed_one_and_is_cut() -> None:
    metered = world("copy_ahead", latency=lambda call: 1e6)
    detector = ScriptedDetector({2: [Call("x" * 10_000, "1")], 4: [Call("tool", "2")]})
    metered.engine.submit(request("a", prompt(1, 9), 8, detector=detector))
    while not metered.meter.interceptions.open:
        metered.step()
    [row] = live_state(metered.meter, texts=False)["intercepted"]
    assert row["tools"] == ["x" * MAX_NAME]
    assert set(metered.meter.read().tools) == {UNKNOWN}
    metered.engine.abort("a")
    metered.step()


def test_a_histogram_counts_what_is_at_most_as_large_as_each_bound() -> None:
    values = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        values.add(value)
    values.add(2.0, times=3)
    assert values.cumulative == [(1.0, 2), (2.0, 6), (float("inf"), 7)]
    assert (number(values), values.total) == (7, 18.0)


def test_a_turn_is_in_time_if_its_first_token_and_its_tokens_are() -> None:
    assert LIMITS.keeps(1.9, 0, 0.4, 9)
    assert LIMITS.keeps(2.9, 10_000, 0.4, 9)
    assert not LIMITS.keeps(2.9, 5_000, 0.4, 9)
    assert not LIMITS.keeps(1.9, 0, 0.5, 9)
