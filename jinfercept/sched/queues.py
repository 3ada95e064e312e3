"""The running, waiting and intercepted sequences, in order of service, and fairness among tenants. Reads no clock.

Tenants that compete for slots, pages and query tokens have virtual token counters, after Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024, section 4). A tenant's counter is the number of tokens computed for it, divided by its
weight. The tenant with the least counter is served next. A tenant that becomes active is lifted to the least counter of the
active ones, so that idle time saves nothing. In addition, a tenant without a running sequence has a right to one, unless its
counter is larger than those of the others.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Container
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, final

from jinfercept.sched.orders import Order
from jinfercept.sched.policy import Observer
from jinfercept.sched.sequence import Sequence, State

REFRESHED = 2
"""Waiting sequences whose keys a plan asks for again."""

LONGEST_S = 600.0
"""Seconds after which a waiting sequence goes before all that have waited less, whatever its order says."""


class Rank(NamedTuple):
    """Sorts waiting sequences; the least starts next. `order` is that of arrivals, and makes ranks unique."""

    priority: int
    key: float
    order: int


_PRIORITY = 1 << 40
"""Distance in `Sequence.order` between two priorities: more than all sequences that ever arrive."""

_ORDER = attrgetter("order")
_RANK = attrgetter("rank")


@dataclass(slots=True)
class TenantQueue:
    running: list[Sequence] = field(default_factory=list)  # sorted as in `Queues`, like `waiting`
    waiting: list[Sequence] = field(default_factory=list)


@final
class Queues:
    """The queues of one scheduler, of which every unfinished sequence is on one; `order` None is first come first served."""

    def __init__(self, max_num_seqs: int, order: Order | None = None) -> None:
        self.observer: Observer | None = None
        # by `Sequence.order`, oldest first; `waiting` likewise, or by `Sequence.rank` if there is an `Order`
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.intercepted: dict[str, Sequence] = {}
        self.by_tenant: dict[str, TenantQueue] = {}  # the same sequences; a tenant that has neither is absent
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))  # the runner's, in which no sequence runs
        self._next_order = 0
        self.order = order
        self._fresh: list[Sequence] = []  # that wait and were not ranked yet
        self._turn: list[Sequence] = []  # that are ranked anew, the last one next
        self._place = _RANK if order is not None else _ORDER

    def put_last(self, sequence: Sequence) -> None:
        """Let a sequence wait behind all of its priority that were put last before it."""
        self.leave(sequence)
        self._next_order += 1
        sequence.order = sequence.priority * _PRIORITY + self._next_order
        self._queue(sequence)

    def put_in_place(self, sequence: Sequence, finished: Sequence) -> None:
        """Let a sequence wait at the place of a finished sequence of its conversation."""
        sequence.order = sequence.priority * _PRIORITY + finished.order % _PRIORITY
        self._queue(sequence)

    def wait(self, sequence: Sequence) -> None:
        self.leave(sequence)
        self._queue(sequence)

    def run(self, sequence: Sequence) -> None:
        self.leave(sequence)
        insort(self.running, sequence, key=_ORDER)
        insort(self._tenant_queue(sequence).running, sequence, key=_ORDER)
        sequence.row.begin(self.free_slots.pop())
        self._enter(sequence, State.RUNNING)

    def succeed(self, sequence: Sequence, retained: Sequence) -> None:
        """Let a sequence wait for the calls of a finished one, in its place."""
        self.intercept(sequence)
        sequence.order = retained.order

    def intercept(self, sequence: Sequence) -> None:
        if self.order is not None:
            self.order.intercepted(sequence)
        self.leave(sequence)
        self.intercepted[sequence.id] = sequence
        self._enter(sequence, State.INTERCEPTED)

    def finish(self, sequence: Sequence) -> None:
        try:
            if self.order is not None:
                self.order.finished(sequence)
        finally:
            self.leave(sequence)
            self._enter(sequence, State.FINISHED)

    def leave(self, sequence: Sequence) -> None:
        row = sequence.row
        if row.slot is not None:
            self.running.remove(sequence)
            self._tenant_queue(sequence).running.remove(sequence)
            self.free_slots.append(row.slot)
            row.slot = None
        elif sequence.state is State.INTERCEPTED:
            del self.intercepted[sequence.id]
        elif sequence.state is State.WAITING and sequence.order:
            self.waiting.remove(sequence)
            self._tenant_queue(sequence).waiting.remove(sequence)
        queue = self.by_tenant.get(sequence.tenant)
        if queue is not None and not queue.running and not queue.waiting:
            del self.by_tenant[sequence.tenant]

    def rank(self, now: float) -> None:
        """Rank the sequences that wait since the last plan, and the next `REFRESHED` others again. Called first in a plan."""
        if self.order is not None and self.waiting:
            fresh, self._fresh = self._fresh, []
            if not self._turn:
                self._turn = self.waiting.copy()
            again = [self._turn.pop() for _ in range(min(REFRESHED, len(self._turn)))]
            for sequence in (*fresh, *again):
                if sequence.state is State.WAITING and (rank := self.rank_of(sequence, now)) != sequence.rank:
                    self._rerank(sequence, rank)

    def rank_of(self, sequence: Sequence, now: float) -> Rank:
        """The rank at `now`: by the order's key, or before all keys once the sequence has waited for `LONGEST_S`."""
        assert self.order is not None
        is_overdue = now - sequence.since_s > LONGEST_S
        key = -math.inf if is_overdue else self.order.key(sequence, now)
        return Rank(sequence.priority, key, sequence.order)

    def _rerank(self, sequence: Sequence, rank: Rank) -> None:
        queues = (self.waiting, self._tenant_queue(sequence).waiting)
        for queue in queues:
            del queue[bisect_left(queue, sequence.rank, key=_RANK)]
        sequence.rank = rank
        for queue in queues:
            insort(queue, sequence, key=_RANK)

    def _queue(self, sequence: Sequence) -> None:
        if self.order is not None:  # the last of its priority until the next plan asks for its key
            self._fresh.append(sequence)
            sequence.rank = Rank(sequence.priority, math.inf, sequence.order)
        insort(self.waiting, sequence, key=self._place)
        insort(self._tenant_queue(sequence).waiting, sequence, key=self._place)
        self._enter(sequence, State.WAITING)

    def _tenant_queue(self, sequence: Sequence) -> TenantQueue:
        queue = self.by_tenant.get(sequence.tenant)
        if queue is None:
            queue = self.by_tenant[sequence.tenant] = TenantQueue()
        return queue

    def _enter(self, sequence: Sequence, state: State) -> None:
        sequence.state = state
        if self.observer is not None:
            self.observer.changed(sequence)


@final
class FairShare:
    """The counters and the rights of the tenants of one scheduler."""

    def __init__(self, queues: Queues) -> None:
        self._queues, self._active = queues, set[str]()
        # tokens computed over the weight, by tenant: of active ones while several compete, and of idle ones that have more
        self.served: dict[str, float] = {}

    def compete(self) -> bool:
        """Whether several tenants are active in the plan that begins. The counters of new ones are lifted."""
        active = self._queues.by_tenant
        if len(active) < 2:  # who comes later is lifted to a tenant that is alone, so its counter need not count
            self.served.clear()
            self._active.clear()
        elif active.keys() != self._active:
            served = self.served
            least = min([served[tenant] for tenant in active if tenant in self._active], default=0.0)
            idle = {tenant: number for tenant, number in served.items() if number > least}
            self.served = idle | {tenant: max(served.get(tenant, 0.0), least) for tenant in active}
            self._active = {*active}
        return len(active) > 1

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        self.served[sequence.tenant] += num_tokens / sequence.weight

    def rank(self, sequence: Sequence) -> Rank:
        """A key to sort sequences by: the least is served next."""
        return Rank(sequence.priority, self.served[sequence.tenant], sequence.order)

    def service_order(self) -> list[Sequence]:
        """The running sequences: each tenant's oldest by arrival, then the others by rank. The last is preempted first."""
        return sorted(self._queues.running, key=self._place)

    def _place(self, sequence: Sequence) -> tuple[bool, Rank]:
        if self._queues.by_tenant[sequence.tenant].running[0] is sequence:
            return False, Rank(0, 0.0, sequence.order)
        return True, self.rank(sequence)

    def next_waiting(self, left_out: Container[str] = ()) -> Sequence | None:
        """The waiting sequence of the least rank that may start, `left_out` tenants aside."""
        queues = (queue.waiting for tenant, queue in self._queues.by_tenant.items() if tenant not in left_out)
        heads = (next((sequence for sequence in waiting if sequence.may_start), None) for waiting in queues)
        return min((head for head in heads if head is not None), key=self._start, default=None)

    def _start(self, head: Sequence) -> tuple[int, float, int, int]:
        # counters are equal when several tenants begin: the one that runs less is first
        num_running = len(self._queues.by_tenant[head.tenant].running)
        return head.priority, self.served[head.tenant], num_running, head.order

    def without_right(self) -> set[str]:
        """Tenants that have a running sequence, or a larger counter than all that have one."""
        queues, served = self._queues.by_tenant, self.served
        most = max([served[tenant] for tenant, queue in queues.items() if queue.running], default=-1.0)
        return {tenant for tenant, queue in queues.items() if queue.running or served[tenant] > most}

    def victim(self, head: Sequence) -> Sequence | None:
        """The running sequence to preempt for a tenant that has a right to run its waiting `head`; None if there is none."""
        least, served = self.served[head.tenant], self.served
        rivals = [queue.running[1:] for tenant, queue in self._queues.by_tenant.items() if served[tenant] >= least]
        # A tenant that runs several sequences gives way: else its long answers would hold every slot. The victim has computed
        # since it was started: else two sequences would bring their contexts to the device in turn for ever.
        victims = [
            sequence for running in rivals for sequence in running if not sequence.planned and sequence.row.num_pages
        ]
        return max(victims, key=self._place, default=None)
