"""A simulated run: latencies, waste and counts from a workload, a profile and a policy. Imports no JAX.

The engine and its scheduler are the real ones. A virtual clock replaces time, and a runner prices plans instead of executing
them: a simulated model writes a request's `forced_output_ids`, and zeros behind them.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from types import MappingProxyType
from typing import NamedTuple, final

from jinfercept.engine.dispatcher import CallDispatcher
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.counts import LIMITS, LatencyLimits
from jinfercept.engine.meter.ledger import Prices
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.errors import ConfigError
from jinfercept.hooks import Text
from jinfercept.kv.manager import KVManager
from jinfercept.request import Request
from jinfercept.sched.door import Overload
from jinfercept.sched.estimator import ESTIMATORS, Estimator, EstimatorChoice, make_estimator
from jinfercept.sched.orders import OrderChoice, check_order_choice
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.sched.plugins import label
from jinfercept.sched.policies import PolicyChoice, PolicyInputs, check_choice
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import SchedulerLimits, plan_scheduler
from jinfercept.sched.sequence import PendingCall
from jinfercept.sched.transfers import Preemption
from jinfercept.sim.run_stats import Report, RunStats
from jinfercept.sim.scripted import (
    ScriptedDispatcher,
    SessionClients,
    SessionLoad,
    drive,
    make_request,
    plain_tokens,
    play,
    session_tokens,
)
from jinfercept.sim.workload import Arrival, Script


@final
class VirtualClock:
    """A clock whose time passes only by `wait`, or when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, wake: Event, timeout_s: float) -> None:
        self.time += timeout_s
        wake.clear()


class PricedStep(NamedTuple):
    """A plan that is not executed, and the seconds at which it would begin and end."""

    tokens: tuple[int, ...]
    submitted_s: float
    done_s: float


@final
class PricedRunner:
    """Prices plans and lets the clock pass: a device that works off its plans one after another.

    At the engine's depth 1 a plan is made and dispatched while the one before it still runs. The clock passes until a plan is
    done when its result is collected.
    """

    def __init__(self, prices: Prices, clock: VirtualClock) -> None:
        self._prices, self._clock = prices, clock
        self._free_s = 0.0  # when everything that was submitted is done

    def forward(self, plan: StepPlan) -> PricedStep:
        compute_s, stall_s = self._prices(plan)
        now = self._clock.time
        self._free_s = max(now, self._free_s) + compute_s + stall_s
        drawn = [chunk.sample.forced or 0 for chunk in plan.chunks if chunk.sample is not None]
        return PricedStep(tuple(drawn), now, self._free_s)

    def sample(self, forward: PricedStep, masks: Masks) -> PricedStep:
        return forward

    def collect(self, ticket: PricedStep) -> StepResult:
        self._clock.time = max(self._clock.time, ticket.done_s)
        return StepResult(ticket.tokens, self._clock.time - ticket.submitted_s)

    def reset(self) -> None:
        """Nothing is kept."""


@final
class OracleEstimator(Estimator):
    """Takes `expected_s` of a call for its true duration."""

    def __init__(self) -> None:
        self._durations: dict[Hashable, float] = {}

    def started(self, call: PendingCall, at_s: float) -> None:
        assert call.expected_s is not None, "an oracle needs the true duration"
        self._durations[call.key] = call.expected_s

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._durations.pop(call.key, None)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        assert call.key in self._durations, "an oracle knows only the calls that have started"
        return max(0.0, self._durations[call.key] - age_s)


SIMULATED_ESTIMATORS: dict[str, Callable[[], Estimator]] = ESTIMATORS | {"oracle": OracleEstimator}
RunWatch = Callable[[RequestLog, KVManager, PolicyInputs, bool], object]
"""Called before a run with the log of its engine, to which it may add a fold, the pages, the policy's inputs, and whether
steps wait for transfers."""
BOUNDS = {"bound": "lru", "free_pause": "swap"}
"""Bounds to compare policies with, and the policies that they run under. `bound` is infinite memory. `free_pause` offloads
and fetches contexts at no cost but the step of the scatter, so that a policy that keeps pages can be a little faster."""

_ENDLESS_TOKENS = 1 << 40


def reads_durations(estimator: EstimatorChoice) -> bool:
    """Whether an estimator takes hints for the true durations of calls, as oracles do."""
    return estimator == "oracle" or getattr(estimator, "reads_durations", False)


@dataclass(frozen=True)
class Simulation:
    """The machine, the policy and the limits of a simulated run.

    Policy, estimator and order are any choice but an object, since every run needs a new one.
    """

    profile: Profile  # the machine, which prices every step
    policy: PolicyChoice  # also a name of `BOUNDS`
    estimator: EstimatorChoice = "elapsed"  # a name of `SIMULATED_ESTIMATORS`, or another choice
    duration_s: float = 1200.0  # seconds in which requests arrive
    drain_s: float | None = None  # seconds after these in which requests may finish; None: as many again
    kv_tokens: int = 53_000
    host_tokens: int = 300_000
    page_size: int = 16
    max_num_seqs: int = 1024
    # tokens per sequence, and of the largest step where prefill is not chunked; by default the limit of a step in vLLM when
    # InferCept was written
    max_model_len: int = 2560
    chunked_prefill: bool | None = None  # None: as the policy was published, if the largest bucket allows it
    # query tokens of the executables, ascending; None: every number up to S, or up to the longest sequence where prefill is
    # not chunked
    buckets: tuple[int, ...] | None = None
    chunk_tokens: int | None = None  # most query tokens of one sequence in one step; None: no limit of its own
    prefix_caching: bool = False
    preemption: Preemption = "policy"
    order: OrderChoice = "fcfs"
    overload: Overload = "serve"  # only sessions are conversations
    depth: int = 0  # 0, or 1 to plan a step before the last one's tokens are read
    # transfers hide behind compute under every policy, as they do in this engine; else `swap` waits for its transfers, as
    # published
    overlaps: bool = False
    # seconds of the engine's own work at every step; depth 1 hides them behind the device, and a call that is shorter has
    # returned by the next plan
    host_s: float = 0.0
    limits: LatencyLimits = LIMITS  # a request that stays within them is goodput
    warm_up_s: float = 0.0  # requests and turns of these first seconds are in no latency and no goodput
    fair: bool = True  # tenants share memory·time by their weights; else all requests are one tenant's
    check: bool = False  # assert the conservation of pages after every step

    def __post_init__(self) -> None:
        check_choice(self._scheduled_policy)
        self._estimator()
        check_order_choice(self.order)
        num_tokens = self.kv_tokens // self.page_size * self.page_size
        if num_tokens < self.max_model_len and self.policy != "bound":
            raise ConfigError(
                "the KV pool is too small for the longest sequence",
                got=f"kv_tokens={self.kv_tokens}, which is {num_tokens} in whole pages of {self.page_size}",
                fix=f"at least {self.max_model_len}",
            )
        self.chunks()

    def chunks(self) -> bool:
        """Whether prefill is chunked. Raises `ConfigError` if no step holds the whole prompts that are asked for."""
        return self._limits(self._executables or (self.max_model_len,)).chunks(self._scheduled_policy)

    @property
    def most_s(self) -> float:
        """Seconds after which the run ends, whatever is unfinished."""
        return self.duration_s + (self.duration_s if self.drain_s is None else self.drain_s)

    @property
    def policy_name(self) -> str:
        return label(self.policy)

    @property
    def estimator_name(self) -> str:
        return label(self.estimator)

    @property
    def order_name(self) -> str:
        return label(self.order)

    @property
    def _scheduled_policy(self) -> PolicyChoice:
        return BOUNDS.get(self.policy_name, self.policy)

    def _estimator(self) -> Estimator:
        return make_estimator(self.estimator, SIMULATED_ESTIMATORS)

    @property
    def _executables(self) -> tuple[int, ...]:
        return self.buckets or tuple(self.profile.bucket_tokens)

    def _limits(self, buckets: tuple[int, ...]) -> SchedulerLimits:
        return SchedulerLimits(
            buckets,
            self.max_num_seqs,
            self.max_model_len,
            self.chunk_tokens,
            True if self.policy_name in BOUNDS else self.chunked_prefill,
            self.preemption,
            overload=self.overload,
        )

    def run(
        self,
        arrivals: Sequence[Arrival] | SessionLoad,
        watch: RunWatch | None = None,
    ) -> Report:
        """Play the arrivals, and report as `RunStats.report` or, of sessions, `RunStats.session_report`."""
        if isinstance(arrivals, SessionLoad):
            return self._run_sessions(arrivals, watch)
        requests = [(at_s, self._request(number, script)) for number, (at_s, script) in enumerate(arrivals)]
        tenant_of = {str(number): arrival.script.tenant for number, arrival in enumerate(arrivals)}
        clock = VirtualClock()
        return self.play(requests, ScriptedDispatcher(clock, plain_tokens), clock, watch, tenant_of)

    def play(
        self,
        requests: Sequence[tuple[float, Request]],
        dispatcher: ScriptedDispatcher,
        clock: VirtualClock,
        watch: RunWatch | None = None,
        tenant_of: Mapping[str, str] = MappingProxyType({}),
        open_text: Callable[[Request], Text] | None = None,
    ) -> Report:
        """Play requests at their seconds, as `run`. `open_text` makes their texts, if their calls are read there."""
        engine, accounts = self.open_engine(clock, dispatcher, open_text, watch)
        played = play(engine, dispatcher, clock, requests, self.most_s, self.host_s)
        counters = engine.scheduler.counters
        return self._named | accounts.report(played, requests, counters, self.kv_tokens, tenant_of, self.warm_up_s)

    def _run_sessions(self, load: SessionLoad, watch: RunWatch | None) -> Report:
        clock = VirtualClock()
        dispatcher = ScriptedDispatcher(clock, plain_tokens)
        engine, accounts = self.open_engine(clock, dispatcher, watch=watch)
        clients = SessionClients(load, session_tokens, reads_durations(self.estimator))
        lasted = drive(engine, dispatcher, clock, clients, self.most_s, self.host_s)
        counters = engine.scheduler.counters
        return self._named | accounts.session_report(clients, lasted, counters, self.kv_tokens, self.warm_up_s)

    @property
    def _named(self) -> Report:
        return {"policy": self.policy_name, "profile": self.profile.name, "host_s": self.host_s}

    def open_engine(
        self,
        clock: VirtualClock,
        dispatcher: CallDispatcher,
        open_text: Callable[[Request], Text] | None = None,
        watch: RunWatch | None = None,
    ) -> tuple[Engine, RunStats]:
        """An engine that prices its steps, with the scheduler that an `LLM` would have, and its statistics."""
        bound, free_pause = self.policy == "bound", self.policy == "free_pause"
        kv = KVManager(
            (_ENDLESS_TOKENS if bound else self.kv_tokens) // self.page_size,
            (_ENDLESS_TOKENS if free_pause else self.host_tokens) // self.page_size,
            self.page_size,
            prefix_caching=self.prefix_caching,
        )
        planned_with = self.profile.without_disk()
        buckets = self._executables
        if not buckets:
            largest = planned_with.saturation
            buckets = tuple(range(1, (largest if self.chunks() else max(largest, self.max_model_len)) + 1))
        estimator, limits = self._estimator(), self._limits(buckets)
        build = plan_scheduler(planned_with, estimator, self._scheduled_policy, limits, self.page_size, self.order)
        synchronous = build.policy.synchronous and not (free_pause or self.overlaps)
        log = RequestLog(clock.now)
        if watch is not None:
            watch(log, kv, build.inputs, synchronous)
        scheduler = build.build(kv)
        prices = Prices(self.profile, self.page_size, synchronous=synchronous, free_transfers=free_pause)
        accounts = RunStats(log, scheduler, prices, buckets[-1], self.limits)
        requests = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=1 << 31, open_text=open_text)
        runner, wake = PricedRunner(prices, clock), threading.Event()
        engine = Engine(requests, runner, wake, depth=self.depth, check=self.check)
        engine.observe(log)
        return engine, accounts

    def _request(self, number: int, script: Script) -> Request:
        request = make_request(number, script, plain_tokens, reads_durations(self.estimator))
        return replace(request, tenant=script.tenant) if self.fair else request
