"""Whatever arrives, calls and hangs: plans stay within their limits, and everybody who can end does, within a bound."""

import pytest
from hypothesis import given, settings

from jinfercept.sched.plan import StepPlan
from jinfercept.sched.policies import SETTINGS
from jinfercept.sched.profile import IDLE_STEP_S
from jinfercept.sched.sequence import Sequence
from jinfercept.sim.workload import Arrival, Script, Segment
from tests.support.scenario_run import (
    BUCKETS,
    ESTIMATORS,
    MAX_SEQS,
    NEVER,
    SIZE,
    Scenario,
    ScenarioRun,
    hangs,
    scenarios,
)

ONE_DEPTH_EACH = [
    pytest.param(policy, depth, marks=() if depth == place % 2 else pytest.mark.slow)
    for place, policy in enumerate(SETTINGS)
    for depth in (0, 1)
]


class Patience:
    """How many plans ago anybody, and each request that runs or waits, last got a token. Fails when that takes too long.

    Whoever is served first needs a plan for every chunk of his context, one for every page that is fetched, and a few to
    land and to read. So long, at most, takes each token that the requests in front of somebody can still write: the older
    ones, and those that ran when he joined the line. With whole prompts, those that come later are in front of him too, and
    with several tenants those of the others.
    """

    def __init__(self, scenario: Scenario) -> None:
        longest = scenario.max_model_len
        chunk = longest if scenario.whole_prompts else min(scenario.chunk_tokens, BUCKETS[-1] - MAX_SEQS + 1)
        self._alone = -(-longest // chunk) + scenario.num_pages + 4
        everybody = scenario.whole_prompts or scenario.num_tenants > 1
        self._later = sum(script.generated for _, script in scenario.arrivals) if everybody else 0
        self._since: dict[
            str, tuple[int, int, int]
        ] = {}  # tokens generated, since which plan, and how many it may take
        self._anybody_at = 0

    def watch(self, run: ScenarioRun) -> None:
        scheduler, now = run.scheduler, len(run.plans)
        ready = [*scheduler.running, *scheduler.waiting]
        since: dict[str, tuple[int, int, int]] = {}
        for sequence in ready:
            mark = self._since.get(sequence.id)
            if mark is None or mark[0] != sequence.generated:
                mark = sequence.generated, now, self._alone * (1 + self._later + _in_front(sequence, run))
            since[sequence.id] = mark
            _, at, most = mark
            assert now - at <= most, f"no token in {now - at} plans, {most} allowed: {sequence}"
        if not ready or since != self._since:
            self._anybody_at = now
        assert now - self._anybody_at <= self._alone, f"nobody got a token in {now - self._anybody_at} plans: {ready}"
        self._since = since


def _in_front(sequence: Sequence, run: ScenarioRun) -> int:
    """Tokens that may be generated before the next one of this sequence."""
    running = set(run.scheduler.running)
    return sum(
        other.max_tokens - other.generated
        for other in run.scheduler.unfinished
        if other is not sequence and (other.order < sequence.order or other in running)
    )


class Limits:
    """What plans keep: bucket, slots, chunks and link. What the pools hold, the engine checks after every step.

    The link has the time of the plan's compute, or of those who ran before it if that is longer (some may have been
    preempted since), or of an idle step if nobody ran; and it may always move a page.
    """

    def __init__(self) -> None:
        self._moved = self._running = self._context = 0
        self.broken: list[str] = []

    def planned(self, run: ScenarioRun, plan: StepPlan) -> None:
        scenario, counters = run.scenario, run.scheduler.counters
        self._expect(plan.num_tokens <= plan.bucket, plan)
        self._expect(plan.bucket in (0, *scenario.buckets), plan)
        self._expect(len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks) <= MAX_SEQS, plan)
        self._expect(scenario.whole_prompts or all(len(c.tokens) <= scenario.chunk_tokens for c in plan.chunks), plan)
        moved = counters.copied_in + counters.copied_out - self._moved
        self._moved += moved
        context = sum(chunk.start + len(chunk.tokens) for chunk in plan.chunks)
        hidden_s = max(
            self._step_s(scenario, plan.num_tokens, context), self._step_s(scenario, self._running, self._context)
        )
        self._expect(run.synchronous or moved <= max(SIZE, scenario.profile.link_tokens(hidden_s)), f"{moved}: {plan}")

    def stepped(self, run: ScenarioRun) -> None:
        running = run.scheduler.running
        self._running, self._context = len(running), sum(sequence.length for sequence in running)

    def _step_s(self, scenario: Scenario, query_tokens: int, context_tokens: int) -> float:
        bucket = next(bucket for bucket in (0, *scenario.buckets) if bucket >= query_tokens)
        return scenario.profile.step_s(bucket, context_tokens) if bucket else IDLE_STEP_S

    def _expect(self, kept: bool, what: object) -> None:
        if not kept:
            self.broken.append(str(what))


def check(scenario: Scenario) -> None:
    """Run the scenario to its end: all end but those that hang, in time and within the limits."""
    limits, patience = Limits(), Patience(scenario)

    def watch(run: ScenarioRun) -> None:
        limits.stepped(run)
        patience.watch(run)

    run = ScenarioRun(scenario, watch=watch, planned=limits.planned).run()
    assert not limits.broken
    for number, (_, script) in enumerate(scenario.arrivals):
        output = run.outputs.get(number)
        if output is None:
            assert hangs(script), f"request {number} never ends"
        else:
            assert output.outputs[0].finish_reason == "length", f"request {number}: {output.outputs[0].finish_reason}"


@settings(max_examples=50)
@given(scenarios())
def test_everybody_who_can_end_does(scenario: Scenario) -> None:
    check(scenario)


@pytest.mark.parametrize(("policy", "depth"), ONE_DEPTH_EACH)
def test_everybody_returning_at_once_is_served(policy: str, depth: int) -> None:
    for num_pages, whole in ((9, False), (20, False), (9, True)):
        script = Script("chat", 9, (Segment(3, 5.0, 6), Segment(2, 5.0, 6), Segment(4, None, 0)))
        coming = tuple(Arrival(0.0, script) for _ in range(7))
        check(Scenario(coming, policy, depth=depth, num_pages=num_pages, whole_prompts=whole, num_host_pages=12))


@pytest.mark.parametrize(("policy", "depth"), ONE_DEPTH_EACH)
def test_calls_that_never_return_pin_nothing(policy: str, depth: int) -> None:
    """Hung contexts fill the pool; then comes a request that needs all of it."""
    hung = Script("chat", 12, (Segment(2, NEVER, 0), Segment(1, None, 0)))
    whole_pool = Script("math", 20, (Segment(3, 0.1, 5), Segment(20, None, 0)))
    for estimator in ESTIMATORS:
        coming = (*(Arrival(0.0, hung) for _ in range(6)), Arrival(1.0, whole_pool), Arrival(1.0, whole_pool))
        check(Scenario(coming, policy, estimator, depth, num_pages=12, num_host_pages=5))
