"""The real engine and scheduler under a virtual clock: plans are priced, not executed; calls return when their time has come.

No JAX, no tokens that mean anything: a simulated model writes zeros, and scripts say when it calls and when it ends.
"""

import heapq
from collections.abc import Mapping
from threading import Event
from typing import NamedTuple, final

from jinfercept.request import Call, Result, Tool
from jinfercept.sched.cost import CostModel
from jinfercept.sched.plan import StepPlan, StepResult


@final
class VirtualClock:
    """Time that passes only when somebody lets it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.next_arrival_s = float("inf")  # an idle engine sleeps no longer than this

    def now(self) -> float:
        return self.time

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Let the time pass at once."""
        self.time = min(self.time + timeout_s, max(self.time, self.next_arrival_s))
        wake.clear()


class Priced(NamedTuple):
    """A plan that was not executed, and what it would cost."""

    num_sampled: int
    compute_s: float
    stall_s: float


@final
class PricedRunner:
    """Prices plans with a cost model and lets the clock pass.

    Args:
        cost: seconds of compute, tokens per second of the link.
        clock: passes by the price of each plan.
        page_size: tokens that a copied page carries.
        synchronous: transfers are not hidden behind compute.
        free_transfers: transfers cost nothing (a bound).
    """

    def __init__(
        self, cost: CostModel, clock: VirtualClock, page_size: int, *, synchronous: bool, free_transfers: bool = False
    ) -> None:
        self._cost, self._clock, self._page_size = cost, clock, page_size
        self._link_tokens_per_s = 0.0 if free_transfers else 1.0 * cost.link_tokens(1.0)
        self._synchronous = synchronous
        self.last = Priced(0, 0.0, 0.0)

    def submit(self, plan: StepPlan) -> Priced:
        compute_s = 0.0
        if plan.chunks:
            context = sum(chunk.start + len(chunk.tokens) for chunk in plan.chunks)
            compute_s = self._cost.step_s(plan.num_tokens, context)
        link_s = 0.0
        if self._link_tokens_per_s:
            pages = len(plan.copy_out) + len(plan.fetch)
            link_s = pages * self._page_size / self._link_tokens_per_s
        stall_s = link_s if self._synchronous else max(0.0, link_s - compute_s)
        return Priced(sum(chunk.sample is not None for chunk in plan.chunks), compute_s, stall_s)

    def collect(self, ticket: Priced) -> StepResult:
        self.last = ticket
        self._clock.time += ticket.compute_s + ticket.stall_s
        return StepResult((0,) * ticket.num_sampled, ticket.compute_s + ticket.stall_s)

    def reset(self) -> None:
        """Nothing is kept."""


@final
class VirtualEndpoints:
    """Answers scripted calls, whose arguments are `"seconds tokens"`, when their time has come."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, str, tuple[Call, ...]]] = []
        self._live: dict[str, int] = {}
        self._count = 0

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool]) -> None:
        self._count += 1
        self._live[request_id] = self._count
        seconds = max(float(call.arguments.split()[0]) for call in calls)
        heapq.heappush(self._due, (self._clock.time + seconds, self._count, request_id, calls))

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        done = []
        while self._due and self._due[0][0] <= self._clock.time:
            _, number, request_id, calls = heapq.heappop(self._due)
            if self._live.get(request_id) == number:
                del self._live[request_id]
                done.append((request_id, tuple(_answer(call) for call in calls)))
        return done

    def next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)


def _answer(call: Call) -> Result:
    seconds, tokens = call.arguments.split()
    return Result("", token_ids=(0,) * int(tokens), duration_s=float(seconds))
