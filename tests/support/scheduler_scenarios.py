"""Scheduling scenarios for property tests: scripted requests, the real engine, a virtual clock, and a runner that checks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from jinfercept.engine.engine import Engine
from jinfercept.events import Finished
from jinfercept.kv.manager import KVManager
from jinfercept.meter.prices import Prices
from jinfercept.request import RequestOutput
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import ESTIMATORS as HONEST
from jinfercept.sched.estimator import OracleEstimator
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import SETTINGS
from jinfercept.sched.profile import Profile
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.scaled_estimator import SCALED_ESTIMATORS
from jinfercept.sim.scripted import ScriptedEndpoints, make_request
from jinfercept.sim.simulator import PricedRunner, VirtualClock
from jinfercept.sim.workload import Script, Segment
from tests.support.fake_engine import VOCAB, FakeRunner

NEVER = 1e9
"""Seconds of a call that does not return while anybody looks."""

SIZE = 4
MAX_SEQS = 3
BUCKETS = (4, 12)
ESTIMATORS = ("elapsed", "history", "oracle", "oracle_wild")


@dataclass(frozen=True)
class Scenario:
    """What is served, and on what. A sequence may be as long as the pool."""

    arrivals: tuple[Arrival, ...]
    policy: str = "copy_ahead"
    estimator: str = "elapsed"
    depth: int = 0
    chunk_tokens: int = 12
    whole_prompts: bool = False
    num_pages: int = 12
    num_host_pages: int = 8
    link_tokens_per_s: float = 800.0
    fixed_s: float = 0.010
    num_tenants: int = 1

    @property
    def profile(self) -> Profile:
        link = self.link_tokens_per_s
        return Profile(
            name="small",
            source="paper",
            fixed_s=self.fixed_s,
            per_query_s=1e-4,
            per_context_s=1e-6,
            saturation=12,
            link_out_tokens_per_s=link,
            link_in_tokens_per_s=link,
            link_both_tokens_per_s=link,
            kv_bytes_per_token=1,
        )

    @property
    def max_model_len(self) -> int:
        return self.num_pages * SIZE

    @property
    def buckets(self) -> tuple[int, ...]:
        """Whole prompts need one that holds the longest."""
        return (*BUCKETS, max(self.max_model_len, 13)) if self.whole_prompts else BUCKETS

    @property
    def limits(self) -> SchedulerLimits:
        chunk_tokens = None if self.whole_prompts else self.chunk_tokens
        return SchedulerLimits(self.buckets, MAX_SEQS, self.max_model_len, chunk_tokens, not self.whole_prompts)


def hangs(script: Script) -> bool:
    """Whether a request waits for a call that never returns."""
    return any(segment.call_s == NEVER for segment in script.segments)


def tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """A prompt or a result; no two prompts begin alike, so that requests share no page."""
    return tuple((number + (place + index) * 7) % VOCAB for index in range(count))


@st.composite
def arrivals(draw: st.DrawFn, max_context: int) -> Arrival:
    """A request of at most `max_context` tokens; one in four fills them."""
    size = max_context if draw(st.integers(0, 3)) == 0 else draw(st.integers(3, max_context))
    prompt = draw(st.integers(1, max(1, size // 2)))
    room = size - prompt
    segments = []
    while room >= 3 and draw(st.booleans()):
        decode = draw(st.integers(1, min(6, room - 1)))
        returned = draw(st.integers(0, min(20, room - decode - 1)))
        segments.append(Segment(decode, draw(st.sampled_from([0.0, 0.005, 0.1, 0.1, 2.0, NEVER])), returned))
        room -= decode + returned
    script = Script(draw(st.sampled_from(["math", "chat"])), prompt, (*segments, Segment(room, None, 0)))
    return Arrival(draw(st.sampled_from([0.0, 0.0, 0.0, 0.03, 0.3, 2.0])), script)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Pools from one that holds nothing but the longest request; `fixed` options are not drawn."""
    num_pages = fixed.get("num_pages") or draw(st.integers(3, 14))
    coming = draw(st.lists(arrivals(num_pages * SIZE), min_size=1, max_size=8))

    def option(name: str, values: tuple[Any, ...]) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values))

    return Scenario(
        tuple(coming),
        policy=option("policy", tuple(SETTINGS)),
        estimator=option("estimator", ESTIMATORS),
        depth=option("depth", (0, 1)),
        chunk_tokens=option("chunk_tokens", (1, 3, 12)),
        whole_prompts=option("whole_prompts", (False, False, True)),
        num_pages=num_pages,
        num_host_pages=option("num_host_pages", (0, 3, 40)),
        link_tokens_per_s=option("link_tokens_per_s", (1.0, 800.0, 1e6)),
        fixed_s=option("fixed_s", (0.001, 0.010)),
        num_tenants=option("num_tenants", (1, 1, 2, 3)),
    )


class CheckedRunner:
    """Executes on the fake device, which asserts what a real one assumes, and takes the time that plans are priced at.

    Args:
        fake: the device.
        priced: the time.
        planned: told of every plan before it runs.
    """

    def __init__(self, fake: FakeRunner, priced: PricedRunner, planned: Callable[[StepPlan], None]) -> None:
        self._fake, self._priced, self._planned = fake, priced, planned

    def forward(self, plan: StepPlan) -> tuple[Any, Any]:
        self._planned(plan)
        return self._fake.forward(plan), self._priced.forward(plan)

    def sample(self, forward: tuple[Any, Any], masks: Masks) -> tuple[StepResult, Any]:
        fake, priced = forward
        return self._fake.sample(fake, masks), self._priced.sample(priced, masks)

    def collect(self, ticket: tuple[StepResult, Any]) -> StepResult:
        done, priced = ticket
        return StepResult(done.tokens, self._priced.collect(priced).elapsed_s)

    def reset(self) -> None:
        self._fake.reset()


class ScenarioRun:
    """The real engine serving a scenario on a virtual clock.

    Args:
        scenario: what is served.
        watch: looks at the run after every step of the engine.
        planned: looks at it when a plan was made and has not run.
        fake: run on the fake device too; without it, plans are only priced, as in a simulation.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        watch: Callable[["ScenarioRun"], None] = lambda run: None,
        planned: Callable[["ScenarioRun", StepPlan], None] = lambda run, plan: None,
        fake: bool = True,
    ) -> None:
        self.scenario = scenario
        self.outputs: dict[int, RequestOutput] = {}
        self.plans: list[PlannedStep] = []
        self.clock = VirtualClock()
        self._watch = watch
        estimator = (HONEST | {"oracle": OracleEstimator} | SCALED_ESTIMATORS)[scenario.estimator]()
        build = plan_scheduler(scenario.profile, estimator, scenario.policy, scenario.limits, SIZE)
        self.synchronous = build.policy.synchronous
        self.scheduler = build.build(KVManager(scenario.num_pages, scenario.num_host_pages, SIZE))
        priced = PricedRunner(Prices(scenario.profile, SIZE, synchronous=self.synchronous), self.clock)
        self._endpoints = ScriptedEndpoints(self.clock, tokens)
        checked = CheckedRunner(FakeRunner(SIZE, scenario.buckets), priced, lambda plan: planned(self, plan))
        self.engine = Engine(
            self.scheduler,
            checked if fake else priced,
            self._endpoints,
            self.clock,
            threading.Event(),
            depth=scenario.depth,
            vocab_size=VOCAB,
            check=fake,
            observe=lambda planned, result: self.plans.append(planned),
        )

    def run(self, max_steps: int = 20_000) -> "ScenarioRun":
        """Until all have finished but those that wait for a call that never returns; fails after `max_steps` steps."""
        known_durations = self.scenario.estimator not in HONEST
        coming = sorted(enumerate(self.scenario.arrivals), key=lambda entry: entry[1].at_s)
        for _ in range(max_steps):
            while coming and coming[0][1].at_s <= self.clock.time:
                number, arrival = coming.pop(0)
                request = make_request(number, arrival.script, tokens, known_durations)
                self.engine.submit(replace(request, tenant=str(number % self.scenario.num_tenants)))
            self._endpoints.next_arrival_s = coming[0][1].at_s if coming else float("inf")
            if self.engine.has_work:
                for event in self.engine.step():
                    if isinstance(event, Finished):
                        self.outputs[int(event.request_id)] = event.output
                self._watch(self)
            elif coming:
                self.clock.time = coming[0][1].at_s
            nobody = not (self.scheduler.running or self.scheduler.waiting or coming)
            if nobody and (not self.engine.has_work or self._endpoints.next_s() >= NEVER):
                return self
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.unfinished}")
