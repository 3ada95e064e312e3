"""Scheduling scenarios: scripted requests, the real engine and scheduler, a virtual clock, and a runner that asserts.

Scenarios are drawn for property tests.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.ledger import Prices
from jinfercept.engine.meter.request_log import LogEvent, RequestLog, Stepped
from jinfercept.events import Finished
from jinfercept.kv.manager import KVManager
from jinfercept.kv.side_pool import NO_SIDES, SideSizes
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import EstimatorChoice, make_estimator
from jinfercept.sched.orders import OrderChoice
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import SETTINGS, PolicyChoice
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import SchedulerLimits, plan_scheduler
from jinfercept.sim.scripted import ScriptedDispatcher, make_request
from jinfercept.sim.simulation import SIMULATED_ESTIMATORS, PricedRunner, VirtualClock, reads_durations
from jinfercept.sim.workload import Arrival, Script, Segment
from tests.support.fake_runner import VOCAB, FakeForward, FakeRunner

NEVER = 1e9
"""Seconds of a call that does not return within a scenario."""


SIZE = 4
"""Tokens per page."""


MAX_SEQS = 3


BUCKETS = (4, 12)


FOLLOW_UP_TOKENS = 4


@dataclass(frozen=True)
class Scenario:
    """The requests and the machine of a check. A sequence may be as long as the pool.

    Attributes:
        arrivals: the requests.
        policy, estimator: any choice of them.
        depth: plans in flight while the next one is made.
        chunk_tokens: most query tokens of one sequence in one step.
        whole_prompts: no chunked prefill.
        num_pages, num_host_pages: slots of the two pools.
        link_tokens_per_s: of the host link, each way.
        fixed_s: seconds of a step without tokens.
        num_tenants: the requests belong to so many tenants in turn.
        one_prompt: all prompts are alike as far as the shorter one goes, so that contexts share pages.
        aborts: seconds and numbers of requests that are aborted then.
        follow_ups: each request that ends is followed, at once, by another one that extends its retained context.
        order: of waiting requests; any choice of one.
        windows: pages of layers with windows; by default the model has none.
        states: of recurrent layers; by default the model has none.
    """

    arrivals: tuple[Arrival, ...]
    policy: PolicyChoice = "copy_ahead"
    estimator: EstimatorChoice = "elapsed"
    depth: int = 0
    chunk_tokens: int = 12
    whole_prompts: bool = False
    num_pages: int = 12
    num_host_pages: int = 8
    link_tokens_per_s: float = 800.0
    fixed_s: float = 0.010
    num_tenants: int = 1
    one_prompt: bool = False
    aborts: tuple[tuple[float, int], ...] = ()
    follow_ups: bool = False
    order: OrderChoice = "fcfs"
    windows: SideSizes = NO_SIDES
    states: SideSizes = NO_SIDES

    @property
    def profile(self) -> Profile:
        """The machine."""
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
        """Tokens of a sequence."""
        return self.num_pages * SIZE

    @property
    def buckets(self) -> tuple[int, ...]:
        """Query tokens of the executables. Whole prompts need one that holds the longest."""
        return (*BUCKETS, max(self.max_model_len, 13)) if self.whole_prompts else BUCKETS

    @property
    def limits(self) -> SchedulerLimits:
        chunk_tokens = None if self.whole_prompts else self.chunk_tokens
        return SchedulerLimits(self.buckets, MAX_SEQS, self.max_model_len, chunk_tokens, not self.whole_prompts)

    def tokens(self, number: int, place: int, count: int) -> tuple[int, ...]:
        """A prompt or a result. Without `one_prompt` no two prompts begin alike, so that requests share no page."""
        first = 0 if self.one_prompt and not place else number
        return tuple((first + (place + index) * 7) % VOCAB for index in range(count))


def hangs(script: Script) -> bool:
    """Whether a request waits for a call that never returns."""
    return any(segment.call_s == NEVER for segment in script.segments)


class _CheckedForward(NamedTuple):
    fake: FakeForward
    priced: Any
    drafts: tuple[tuple[int, ...], ...]


class CheckedRunner:
    """Executes on the fake device, which asserts what a real one assumes, and takes the time that plans are priced at.

    Args:
        planned: called with every plan before it runs.
    """

    def __init__(self, fake: FakeRunner, priced: PricedRunner, planned: Callable[[StepPlan], None]) -> None:
        self._fake, self._priced, self._planned = fake, priced, planned

    def forward(self, plan: StepPlan) -> _CheckedForward:
        self._planned(plan)
        forward = self._fake.forward(plan)
        return _CheckedForward(forward, self._priced.forward(plan), forward.drafts)

    def sample(self, forward: _CheckedForward, masks: Masks) -> tuple[StepResult, Any]:
        fake, priced, _ = forward
        return self._fake.sample(fake, masks), self._priced.sample(priced, masks)

    def collect(self, ticket: tuple[StepResult, Any]) -> StepResult:
        result, priced = ticket
        return StepResult(result.tokens, self._priced.collect(priced).elapsed_s)

    def reset(self) -> None:
        self._fake.reset()


class ScenarioRun:
    """The real engine serving a scenario on a virtual clock.

    Args:
        watch: called after every step of the engine.
        planned: called when a plan was made and has not run.
        fake: run on the fake device too; without it, plans are only priced, as in a simulation.

    Attributes:
        outputs: by the request's number; of those that were aborted too.
        failures: what the engine's steps have raised.
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
        self.failures: list[BaseException] = []
        self.plans: list[PlannedStep] = []
        self.clock = VirtualClock()
        self._watch = watch
        estimator = make_estimator(scenario.estimator, SIMULATED_ESTIMATORS)
        build = plan_scheduler(scenario.profile, estimator, scenario.policy, scenario.limits, SIZE, scenario.order)
        self.synchronous = build.policy.synchronous
        sides = scenario.states if scenario.states.num_slots else scenario.windows
        kv = KVManager(scenario.num_pages, scenario.num_host_pages, SIZE, sides=sides)
        self.scheduler = build.build(kv)
        priced = PricedRunner(Prices(scenario.profile, SIZE, synchronous=self.synchronous), self.clock)
        self._dispatcher = ScriptedDispatcher(self.clock, scenario.tokens)
        window, has_states = scenario.windows.window or None, scenario.states.num_slots > 0
        device = FakeRunner(SIZE, scenario.buckets, window=window, has_states=has_states)
        checked = CheckedRunner(device, priced, lambda plan: planned(self, plan))
        log = RequestLog(self.clock.now)
        log.tell(self._note)
        requests = RequestLifecycle(self.scheduler, self._dispatcher, self.clock, vocab_size=VOCAB)
        runner, wake = checked if fake else priced, threading.Event()
        self.engine = Engine(requests, runner, wake, depth=scenario.depth, check=fake)
        self.engine.observe(log)

    def _note(self, event: LogEvent) -> None:
        if isinstance(event, Stepped):
            self.plans.append(event.planned)

    def run(self, max_steps: int = 20_000) -> "ScenarioRun":
        """Until all have finished but those that wait for a call that never returns.

        Raises:
            AssertionError: after `max_steps` steps; or pages are lost, or owned twice, after a step.
        """
        coming = sorted(enumerate(self.scenario.arrivals), key=lambda entry: entry[1].at_s)
        aborts = sorted(self.scenario.aborts)
        for _ in range(max_steps):
            while coming and coming[0][1].at_s <= self.clock.time:
                self._submit(*coming.pop(0))
            while aborts and aborts[0][0] <= self.clock.time:
                self.engine.abort(str(aborts.pop(0)[1]))
            self._dispatcher.next_arrival_s = min(
                coming[0][1].at_s if coming else float("inf"), aborts[0][0] if aborts else float("inf")
            )
            if self.engine.has_work:
                self._step()
            elif coming:
                self.clock.time = coming[0][1].at_s
            else:
                return self
            idle = not (self.scheduler.running or self.scheduler.waiting or coming or aborts)
            if idle and self._dispatcher.next_s() >= NEVER:
                return self
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.unfinished}")

    def _submit(self, number: int, arrival: Arrival) -> None:
        scenario = self.scenario
        request = make_request(number, arrival.script, scenario.tokens, reads_durations(scenario.estimator))
        follow_up = FollowUp() if scenario.follow_ups else None
        self.engine.submit(replace(request, tenant=str(number % scenario.num_tenants), follow_up=follow_up))

    def _follow(self, number: int, output: RequestOutput) -> None:
        """Submit the follow-up of a request, with a question of 3 tokens and an answer of `FOLLOW_UP_TOKENS`."""
        count = len(self.scenario.arrivals)
        prompt = (*output.prompt_token_ids, *output.outputs[0].token_ids, *self.scenario.tokens(number, 1, 3))
        if number < count and len(prompt) + FOLLOW_UP_TOKENS < self.scenario.max_model_len:
            params = SamplingParams(temperature=0.0, max_tokens=FOLLOW_UP_TOKENS, ignore_eos=True)
            self.engine.submit(Request(str(number + count), prompt, params, follows=str(number)))

    def _step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Finished):
                self.outputs[int(event.request_id)] = event.output
                if self.scenario.follow_ups:
                    self._follow(int(event.request_id), event.output)
                if event.failure is not None:
                    self.failures.append(event.failure)
        self._watch(self)


__all__ = ["BUCKETS", "ESTIMATORS", "MAX_SEQS", "NEVER", "SIZE", "Scenario", "ScenarioRun", "hangs", "scenarios"]


ESTIMATORS = ("elapsed", "history", "oracle")


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

    scenario = Scenario(
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
    beside = draw(st.sampled_from(["", "", "windows", "states"]))
    if beside == "states":
        num_states = draw(st.integers(1, 8))
        return replace(scenario, states=SideSizes(num_states, draw(st.sampled_from([0, 2, 20])), 3))
    if beside == "windows":
        window = draw(st.sampled_from([2, 9, 16]))
        return replace(scenario, windows=draw(windows(window, scenario.buckets[-1])))
    return scenario


@st.composite
def windows(draw: st.DrawFn, window: int, most_tokens: int) -> SideSizes:
    """Pools of layers with windows, from one that holds one running sequence."""
    slack = SIZE + 1
    each = (window + slack) // SIZE + 2
    num_pages = most_tokens // SIZE + 2 + each * draw(st.integers(1, 5))
    return SideSizes(num_pages, draw(st.sampled_from([0, 3, 40])), 0.5, window, slack)
