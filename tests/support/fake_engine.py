"""Engines on the fake runner, their clocks and their dispatcher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.engine.dispatcher import CallDispatcher, Clock, Dispatcher, RealClock
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.errors import RequestError
from jinfercept.events import Finished as FinishedEvent
from jinfercept.hooks import Text
from jinfercept.kv.manager import KVManager
from jinfercept.kv.side_pool import NO_SIDES, SideSizes
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.door import Overload
from jinfercept.sched.estimator import ElapsedEstimator, Estimator
from jinfercept.sched.orders import Order
from jinfercept.sched.plan import PlanRunner, StepPlan
from jinfercept.sched.policies import SETTINGS, PolicyInputs
from jinfercept.sched.policy import Policy
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits
from jinfercept.sched.speculation import NO_DRAFTS, SpeculationLimits
from tests.support.fake_runner import VOCAB, FakeRunner, next_token

__all__ = [
    "POLICIES",
    "VOCAB",
    "AffineCost",
    "FakeRunner",
    "InstantDispatcher",
    "ManualClock",
    "copying_token",
    "make_engine",
    "next_token",
    "run_all",
    "uninterrupted",
]


@dataclass(frozen=True)
class AffineCost:
    """A cost model of a few numbers, without contexts."""

    fixed_s: float = 0.010
    per_query_s: float = 50e-6
    link_tokens_per_s: float = 20_000.0
    disk_tokens_per_s: float = 1_000.0

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        return self.fixed_s + self.per_query_s * query_tokens

    def link_tokens(self, seconds: float) -> int:
        return int(self.link_tokens_per_s * seconds)

    def plan_s(self, plan: StepPlan) -> float:
        return self.step_s(plan.num_tokens, 0)

    def swap_s(self, num_tokens: int) -> float:
        return num_tokens / self.link_tokens_per_s

    def copies_s(self, num_tokens: int) -> float:
        return 0.0

    def disk_s(self, num_tokens: int) -> float:
        return num_tokens / self.disk_tokens_per_s

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        return -(-num_tokens // chunk_tokens) * self.fixed_s + self.per_query_s * num_tokens


POLICIES: dict[str, Callable[[], Policy]] = {
    name: lambda name=name: PolicyInputs(AffineCost(), 16, 4, ElapsedEstimator()).make(name) for name in SETTINGS
}
"""Every policy that can be selected, by name."""


class ManualClock:
    """A clock that moves when somebody waits, and a little on every look."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1e-4
        return self.time

    def wait(self, wake: Event, timeout_s: float) -> None:
        self.time += timeout_s
        wake.clear()


class InstantDispatcher:
    """Answers calls on the engine's own clock: `latency(call)` seconds after the call, with `answer(call)`."""

    def __init__(self, clock: Clock, latency: Callable[[Call], float], answer: Callable[[Call], Result]) -> None:
        self.clock, self.latency, self.answer = clock, latency, answer
        self.due: dict[str, tuple[float, tuple[Call, ...]]] = {}
        self.started: list[tuple[float, str, Call]] = []
        self.cancelled: list[str] = []

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str) -> None:
        self.due[request_id] = (self.clock.now() + max(map(self.latency, calls)), calls)

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        now = self.clock.now()
        done = [request_id for request_id, (due, _) in self.due.items() if due <= now]
        return [(request_id, tuple(map(self.answer, self.due.pop(request_id)[1]))) for request_id in done]

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        assert (request_id, call.id) not in {(owner, other.id) for _, owner, other in self.started}, "started twice"
        self.started.append((self.clock.now() + self.latency(call), request_id, call))

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        now = self.clock.now()
        done = [(owner, call, self.answer(call)) for due, owner, call in sorted(self.started, key=_due) if due <= now]
        self.started = [entry for entry in self.started if entry[0] > now]
        return done

    def next_s(self) -> float | None:
        times = [*(due for due, _ in self.due.values()), *(due for due, _, _ in self.started)]
        return min(times, default=None)

    def cancel(self, request_id: str) -> None:
        self.due.pop(request_id, None)
        self.cancelled += [call.id for _, owner, call in self.started if owner == request_id]
        self.started = [entry for entry in self.started if entry[1] != request_id]


def _due(entry: tuple[float, str, Call]) -> float:
    return entry[0]


def make_engine(
    policy: Policy,
    *,
    num_pages: int,
    num_host_pages: int = 0,
    page_size: int = 4,
    depth: int = 0,
    buckets: tuple[int, ...] = (4, 16),
    max_num_seqs: int = 4,
    chunk_tokens: int = 1 << 30,
    max_model_len: int | None = None,
    states: SideSizes = NO_SIDES,
    clock: Clock | None = None,
    dispatcher: CallDispatcher | None = None,
    runner: PlanRunner[Any, Any] | None = None,
    link_tokens_per_s: float = 1e9,
    prefix_caching: bool = True,
    eos_token_ids: tuple[int, ...] = (),
    open_text: Callable[[Request], Text] | None = None,
    encode: Callable[[str], list[int]] | None = None,
    estimator: Estimator | None = None,
    retain: Callable[[Scheduler], RetainedContexts] = RetainedContexts,
    vocab_size: int = VOCAB,
    speculation: SpeculationLimits = NO_DRAFTS,
    order: Order | None = None,
    overload: Overload = "serve",
    per_query_s: float = AffineCost.per_query_s,
) -> Engine:
    """An engine on a fake runner, checked after every step."""
    kv = KVManager(num_pages, num_host_pages, page_size, prefix_caching=prefix_caching, sides=states)
    scheduler = Scheduler(
        kv,
        policy,
        AffineCost(link_tokens_per_s=link_tokens_per_s, per_query_s=per_query_s),
        estimator or ElapsedEstimator(),
        SchedulerLimits(
            buckets,
            max_num_seqs,
            max_model_len or num_pages * page_size,
            chunk_tokens,
            speculation=speculation,
            overload=overload,
        ),
        order=order,
    )
    wake = Event()
    requests = RequestLifecycle(
        scheduler,
        dispatcher or Dispatcher(wake.set),
        clock or (ManualClock() if dispatcher else RealClock()),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        open_text=open_text,
        encode=encode,
        retained=retain(scheduler),
        returns_experts=False,
    )
    return Engine(requests, runner or FakeRunner(page_size, buckets), wake, depth=depth, check=True)


def runner_of(engine: Engine) -> FakeRunner:
    """The runner of an engine that was made without one."""
    runner = engine._runner  # pyright: ignore[reportPrivateUsage]
    assert isinstance(runner, FakeRunner)
    return runner


def fail_next_step(engine: Engine) -> None:
    runner = runner_of(engine)
    runner.fail_at = len(runner.plans) + 1


def run_all(engine: Engine, requests: list[Request], max_steps: int = 20_000) -> dict[str, RequestOutput]:
    """Serve the requests to the end; fails if that takes more than `max_steps` iterations."""
    for request in requests:
        engine.submit(request)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                outputs[event.request_id] = event.output
    assert not engine.has_work, f"hangs: {engine.scheduler.unfinished}"
    occupancy = engine.scheduler.kv.occupancy()
    assert occupancy.used == 0
    assert occupancy.paused == 0
    return outputs


def copying_token(context: list[int], words: Sequence[int] | None = None) -> int:
    """The token of a model that repeats itself: three of four follow from the two before them, the others from all."""
    few = next_token(context) % 4 != 0
    return next_token([token % 3 for token in context[-2:]] if few else context, words)


def uninterrupted(
    prompt: Sequence[int], params: SamplingParams, script: Mapping[int, list[int]], max_model_len: int
) -> list[int]:
    """The stream that the fake model writes without a pause: `script` gives returned tokens by generated count."""
    if len(prompt) >= max_model_len:
        raise RequestError("too long", got=len(prompt), fix="shorten it")
    context, generated = list(prompt), 0
    while True:
        context.append(next_token(context))
        generated += 1
        if generated == params.max_tokens or len(context) >= max_model_len:
            return context[len(prompt) :]
        if generated in script:
            context += script[generated][: max_model_len - len(context) - 1]


SAMPLED = ("discard", "swap", "min_waste", "copy_ahead", "lru_host")
"""Policies of which every kind of move is one's: none, all out, by cost, ahead of the need, all through."""


def sampled_policies() -> Iterator[Any]:
    """Every policy with its number; by default those that are sampled."""
    for number, policy in enumerate(POLICIES):
        yield pytest.param(number, policy, marks=() if policy in SAMPLED else pytest.mark.slow, id=policy)


def sampled_names() -> Iterator[Any]:
    """Every policy; by default those that are sampled."""
    for policy in POLICIES:
        yield pytest.param(policy, marks=() if policy in SAMPLED else pytest.mark.slow)


def sampled_depths() -> Iterator[Any]:
    """Every policy at both depths of the pipeline; by default those that are sampled, each at one."""
    for number, policy in enumerate(POLICIES):
        for depth in (0, 1):
            default = policy in SAMPLED and depth == number % 2
            yield pytest.param(policy, depth, marks=() if default else pytest.mark.slow, id=f"{policy}, {depth}")
