"""The loop: poll, plan, forward, sample, collect. Knows plans in flight; no JAX, no asyncio, no policy.

At depth 0 a plan is collected before the next one is made. At depth 1 it is collected after the next one was dispatched, so the
device never waits for the host. A call or an end that is then detected late costs one void sample.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinfercept.engine.disk_contexts import CLOSE_S, DiskContexts
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.errors import PluginError
from jinfercept.events import Event
from jinfercept.outputs import FinishReason
from jinfercept.request import Request
from jinfercept.sched.plan import Masks, PlanRunner
from jinfercept.sched.plan_builder import PlannedStep

log = logging.getLogger(__name__)

_MOST_TAKEN_IN = 64
"""Arrivals and aborts that one step takes in: each costs up to a millisecond, for which all running requests wait."""
MAX_IDLE_S = 1.0
"""Seconds between two polls, at most, while every request is intercepted."""


class Engine:
    """Serves requests on one runner. One thread calls `step`; `submit` and `abort` may be called from any.

    Args:
        wake: event that the dispatcher sets when a result arrives, which ends an idle wait.
        depth: plans in flight while the next one is made, 0 or 1.
        check: assert the conservation of pages after every step.
        disk: None: no contexts on disk.
    """

    def __init__(
        self,
        requests: RequestLifecycle,
        runner: PlanRunner[Any, Any],
        wake: threading.Event,
        *,
        depth: int,
        check: bool = False,
        disk: DiskContexts | None = None,
    ) -> None:
        self.failure: BaseException | None = None  # of a failed step from which the engine could not recover
        # While it rests, no step is planned. Arrivals and results of calls are taken in, and wait.
        self.is_resting = self._has_warned = False
        self.scheduler, self.wake, self.disk = requests.scheduler, wake, disk
        self._log: RequestLog | None = None
        self.requests, self._clock = requests, requests.clock
        self._runner, self._depth, self._check = runner, depth, check
        self._arrivals: deque[Request | str] = deque()  # submitted requests, and ids of aborted ones
        self._in_flight: deque[tuple[PlannedStep, object]] = deque()
        self._quiescent_at: int | None = 0  # finished requests when the last plan was made, if that was empty

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it can never be served."""
        self.requests.reserve(request)
        self._arrivals.append(request)
        self.wake.set()

    def abort(self, request_id: str) -> None:
        """End a request in any state. Unknown ids are ignored."""
        put = self._arrivals.appendleft if request_id in self.requests else self._arrivals.append
        put(request_id)  # its pages do not wait for many arrivals
        self.wake.set()

    @property
    def num_retained(self) -> int:
        return len(self.requests.retained.sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the waiting queue and at the door, and of arrivals that the next step takes in."""
        return len(self._arrivals) + len(self.scheduler.waiting) + len(self.scheduler.door.sequences)

    def num_waiting_by_tenant(self, tenants: Iterable[str]) -> dict[str, int]:
        """Number of waiting requests of each of these tenants, 0 included."""
        waiting = Counter(item.tenant for item in tuple(self._arrivals) if isinstance(item, Request))
        return {tenant: waiting[tenant] + self.scheduler.num_waiting_of(tenant) for tenant in tenants}

    # -- from the engine's thread ----------------------------------------------------------------------------------

    def observe(self, log: RequestLog) -> None:
        """Pass a log all changes of requests, plans' results and steps' events from now on."""
        self._log = log
        self.scheduler.observe(log)

    def release(self, request_id: str) -> None:
        """Drop the retained context of a finished request. Unknown ids are ignored."""
        self.requests.retained.drop(request_id, self._clock.now())

    def reset_prefix_cache(self) -> bool:
        """Drop the pages of finished requests and their retained contexts; False if unfinished requests hold others."""
        self.requests.retained.clear(self._clock.now())
        self.scheduler.kv.drop_prefixes()
        return not self.has_work

    def place_at_door(self, requests: Sequence[Request]) -> int:
        """Place from 1, among their tenant's requests at the door, of the last of these requests; 0 if none is there."""
        while self._arrivals:
            self._take_in()
        at_door = [it.id for it in self.scheduler.door.sequences if it.tenant == requests[0].tenant]
        return max([at_door.index(it.id) + 1 for it in requests if it.id in at_door], default=0)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.requests or self._arrivals)

    @property
    def quiescent(self) -> bool:
        """Whether the last plan was empty and no request finished since: without new requests a step would move nothing."""
        return self._quiescent_at == self.requests.num_finished and self._disk_is_settled

    def step(self) -> list[Event]:
        """Run one iteration, and return its events in order. Waits only if there is nothing to do before a call returns."""
        try:
            if self._in_flight and self.scheduler.waits:
                self._collect_all()
            self._poll()
            if self.is_resting:
                self._quiescent_at = self.requests.num_finished
                if not self.requests.events and self.requests:
                    self._wait()
            else:
                self._go_on()
        except BaseException as error:  # an interrupt too may leave pages that were planned and never computed
            self._recover(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        if self._check:
            self.check_pages()
        events = self.requests.events.copy()
        self.requests.events.clear()
        if self._log is not None:
            self._log.passed(events)
        return events

    def between_steps(
        self, change: Callable[[], None], *, first_end: tuple[FinishReason, BaseException | None] | None = None
    ) -> None:
        """Change something that plans in flight depend on, after they are collected. The next step returns their events.

        An exception of `change` ends all requests, and is raised.

        Args:
            first_end: ends every request before the change, with the reason, and the failure that lost it or None.
        """
        try:
            self._collect_all()
            if first_end is not None:
                while self._arrivals:
                    self._poll()
                self.requests.end_all(*first_end)
            change()
        except BaseException as error:
            self._recover(error)
            raise

    def take_weights(self, version: int, *, recompute: bool) -> None:
        """Use new weights, in `between_steps`.

        Args:
            recompute: no page that older weights computed stays, see `Upheaval.change_weights`.
        """
        if recompute:
            self.requests.retained.clear(self._clock.now())
        else:
            # retained contexts stay for requests that name them
            self.requests.retained.keep_named()
        self.scheduler.change_weights(recompute=recompute)
        self.requests.weights_version = version

    def leave_device(self) -> None:
        """Give all device pages back, in `between_steps`."""
        self.scheduler.leave_device(self._clock.now())

    def close(self) -> None:
        """Abort every request, and wait for the plans in flight."""
        self.requests.close()
        self._arrivals.clear()
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft()[1])
        if self.disk is not None:
            self._save(self.disk)
        self.requests.retained.clear(self._clock.now())

    def check_pages(self) -> None:
        """Assert that no page is lost or owned twice."""
        contexts = [sequence.context for sequence in self.scheduler.unfinished]
        self.scheduler.kv.check([*contexts, *(() if self.disk is None else self.disk.contexts)])

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        now = self._clock.now()
        if self.requests.retained.groups:
            self.requests.retained.expire(now)
        if self.disk is not None:
            self.disk.read_ahead(now)
        planned = self.scheduler.plan(now)
        has_work = bool(planned.plan)
        self._quiescent_at = None if has_work else self.requests.num_finished
        if has_work:
            forward = self._runner.forward(planned.plan)
            if planned.has_drafts and planned.plan.awaits_drafts:
                planned = planned.with_drafts(forward.drafts)
            masks: Masks = {}
            if self.requests.awaits_masks(planned):
                self._collect_all()  # a mask depends on its row's last token; the device runs the forward pass
                masks = self.requests.masks(planned)
            self._in_flight.append((planned, self._runner.sample(forward, masks)))
        if self.disk is not None:
            self.disk.write_behind(has_moved=bool(planned.plan.offload))
        # drafts continue tokens that the host knows, so no plan may be in flight when the next one is made
        if planned.has_drafts:
            self._collect_all()
        elif self._in_flight and (len(self._in_flight) > self._depth or not has_work):
            self._collect()
        elif not has_work and not self.requests.events and (self.requests or not self._disk_is_settled):
            assert not self.scheduler.running or not self.has_work, "requests run and nothing can be planned"
            assert not self.scheduler.waiting or self.disk or self.scheduler.turns_away, (
                "requests wait and nothing can be planned"
            )
            self._wait()

    def _poll(self) -> None:
        self._take_in()
        self.requests.poll()

    def _take_in(self) -> None:
        for _ in range(min(_MOST_TAKEN_IN, len(self._arrivals))):
            item = self._arrivals.popleft()
            if not isinstance(item, Request):
                self.requests.abort(item)
            else:
                if self.is_resting and not self._has_warned:
                    self._has_warned = True
                    log.warning(
                        "request %s waits: the LLM sleeps until wake(); later ones wait without a word", item.id
                    )
                self.requests.open(item)
        if self._arrivals:
            self.wake.set()  # the rest is for the next step

    def _collect(self) -> None:
        planned, ticket = self._in_flight.popleft()
        result = self._runner.collect(ticket)
        if self._log is not None:
            self._log.stepped(planned, result)
        self.requests.apply(planned, result)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.note_step(planned, self._clock.now())

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _recover(self, error: BaseException) -> None:
        self.failure = error  # if what follows raises, the engine is not usable any more
        self._in_flight.clear()
        if self.disk is not None:
            self.disk.end_reads()
        self.requests.end_all("error", error)
        self.requests.retained.clear(self._clock.now())
        self.scheduler.kv.drop_prefixes()
        self.scheduler.kv.take_dropped()
        self._runner.reset()
        self.failure = None
        if not isinstance(error, KeyboardInterrupt):
            # a mistake of a user's own code says all that is to be known
            trace = None if isinstance(error, PluginError) else error
            log.error("a step failed; all requests in the engine are lost: %s", error, exc_info=trace)

    @property
    def _disk_is_settled(self) -> bool:
        return self.disk is None or self.disk.is_settled

    def _save(self, disk: DiskContexts) -> None:
        deadline_s = self._clock.now() + CLOSE_S
        disk.end_reads()
        while self.failure is None and (now := self._clock.now()) < deadline_s:
            planned = self.scheduler.plan(now)
            if planned.plan:
                self._runner.collect(self._runner.sample(self._runner.forward(planned.plan), {}))
            disk.write_behind(has_moved=bool(planned.plan.offload))
            if not planned.plan:
                if disk.is_settled:
                    break
                self._wait()
        disk.close()

    def _wait(self) -> None:
        times = self.requests.dispatcher.next_s(), None if self.disk is None else self.disk.next_s()
        seconds = [at_s - self._clock.now() for at_s in times if at_s is not None]
        self._clock.wait(self.wake, max(0.0, min([MAX_IDLE_S, *seconds])))
