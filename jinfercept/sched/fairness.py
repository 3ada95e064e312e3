"""Every rule of fairness among tenants that compete for slots, pages and query tokens. Moves nothing, reads no clock.

A tenant's use is memory·time: the tokens of context that its running sequences hold, times seconds, divided by its weight
(token·seconds). Paused and retained contexts cost nothing, since they may be evicted at any time. The order is that of virtual
token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, sections 4 and 4.3): the tenant that has
used least is served next. So tenants that always have work get memory·time as their weights say, and what one does not use goes
to the others in the same proportion. There a tenant that becomes active begins no lower than the least that an active tenant
has used. Here what counts is the use beyond a tenant's share, which is all that runs over the weights of the tenants that
competed within `CREDIT_S`: what a tenant leaves of its share is not saved, so that one that comes anew is not before those that
stay within theirs, and what a tenant uses beyond it counts up to all that runs for `CREDIT_S`.

The order alone would let long sequences of one tenant hold all slots for minutes. So there are rights, too. A tenant without
a running sequence has a right to one; if its weight is lower than another tenant's and its share less than one sequence, only
while it has used no more. A tenant that would still run at most half as many as another one after its next, or hold at most
half as many tokens, each number divided by the weight, and has used no more, has a right to that next: the first if it lacks
a slot, the second if it lacks pages. The sequence that gives way to a right is the last in the service order among the tenants
above. A tenant's oldest running sequence does not give way to a right, so that no two tenants evict each other in turns.

A tenant that stays within its share on average has bursts that exceed it, for which a tenant that takes all that is left would
leave nothing. So the half grows with what the other tenant has used more, up to one and a half at `AHEAD_S` seconds of all that
runs. A tenant that has used more than another one by that is ahead of it. Then:

* Its oldest sequence gives way, too, if it has not done so for `CREDIT_S`; its right to a sequence comes back after `AHEAD_S`.
* A step that runs sequences of the other tenant has only so many tokens of the tenant that is ahead as the step has to spare;
  of `LEFT_OUT_STEPS` such steps in a row one is as long as it gets.
* Its prompts do not make a step much longer than decoding does, for `CREDIT_S` after the other tenant has gone, and a step is
  planned when the step before it has ended: a request that arrives waits for the step that runs, and for no planned one.

A sequence carries the weight of its tenant, so that a changed weight counts from the next request on.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from typing import final

from jinfercept.kv.context import Context
from jinfercept.sched.load import EngineLoad, QueuedWork
from jinfercept.sched.queues import Queues, TenantQueue
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.step_budget import StepBudget

RIGHT = 2.0
"""How many times what a tenant holds after its next sequence another one has to hold, for a right to that."""
AHEAD_S = 2.0
"""Seconds of the contexts of all running sequences by which a tenant that is ahead has used more than another one."""
CREDIT_S = 8.0
"""Seconds of the contexts of all running sequences that a tenant counts as having used beyond its share, at most."""
LEFT_OUT_STEPS = 4
"""Of so many steps in a row one leaves out no tenant that is ahead."""
SPARE = 1.25
"""Times the length of a step by which the sequences of tenants that are ahead may prolong it."""
_MOST_IDLE = 4096
"""Idle tenants whose use is remembered."""

Rank = tuple[bool, int, float, int]


@final
class FairShare:
    """The use and the rights of the tenants of one scheduler.

    Args:
        budget: says how long steps last.
        beyond_short: query tokens of the largest step that the prompts of tenants that are ahead leave.

    Attributes:
        ahead: active tenants that are ahead of one that has competed within `CREDIT_S`.
    """

    def __init__(self, queues: Queues, budget: StepBudget, beyond_short: int) -> None:
        self._queues, self._budget, self._beyond_short = queues, budget, beyond_short
        self._left_by: dict[str, int] = {}  # query tokens that tenants leave in the step that is planned
        self.ahead: set[str] = set()
        self._held = 0.0  # tokens that all running sequences hold: the most of late
        self._num_left_out = 0  # steps since the last one that could not leave out sequences
        self._share = 0.0  # token·seconds over its weight that each tenant could have used so far
        self._used: dict[str, float] = {}  # by tenant: `_share` at least, and what it has used beyond that
        # tenants that competed within `CREDIT_S`: when last, and their weight; the latest at the end
        self._met: dict[str, tuple[float, float]] = {}
        self._at_s = 0.0  # of the last plan
        self._gave_way: dict[str, float] = {}  # tenants whose last sequence did within `CREDIT_S`, and when
        self._weights = self._most_weight = 0.0  # of the tenants that compete: their sum, and the largest

    def charge(self, now: float) -> bool:
        """Charge running sequences for the time since the last plan; returns whether several tenants compete, or one is ahead.

        Args:
            now: seconds on the engine's clock.
        """
        queues, elapsed_s = self._queues.by_tenant, now - self._at_s
        self._at_s = now
        num_tokens = sum([len(sequence.tokens) for sequence in self._queues.running])
        self._held = max(num_tokens, self._held * (1.0 - min(1.0, elapsed_s / CREDIT_S)))
        met, gave_way, used = self._met, self._gave_way, self._used
        while met and met[oldest := next(iter(met))][0] < now - CREDIT_S:
            del met[oldest]
        while gave_way and gave_way[oldest := next(iter(gave_way))] < now - CREDIT_S:
            del gave_way[oldest]
        if len(queues) < 2:  # alone there is nothing to charge
            if met or self.ahead:
                self._find_ahead()
            return bool(self.ahead)
        weights = [(queue.running or queue.waiting)[0].weight for queue in queues.values()]
        self._weights, self._most_weight = sum(weights), max(weights)
        for tenant, weight in zip(queues, weights, strict=True):
            met.pop(tenant, None)
            met[tenant] = now, weight
        before = self._share
        self._share += elapsed_s * self._held / sum([weight for _, weight in met.values()])
        for tenant, queue in queues.items():
            charge = elapsed_s * sum([len(sequence.tokens) / sequence.weight for sequence in queue.running])
            used[tenant] = min(max(used.pop(tenant, 0.0), before) + charge, self._share + CREDIT_S * self._held)
        self._find_ahead()
        if len(used) > len(queues) + _MOST_IDLE:
            gone = next(tenant for tenant in used if tenant not in queues)
            del used[gone]
            met.pop(gone, None)
        return True

    def _find_ahead(self) -> None:
        """Find the active tenants that are ahead of one that has competed of late."""
        least = min([self.used(tenant) for tenant in self._met], default=math.inf) + (AHEAD_S * self._held or math.inf)
        by_tenant = self._queues.by_tenant
        self.ahead = {tenant for tenant in by_tenant if self.used(tenant) >= least} if least < math.inf else set()
        self._left_by = dict.fromkeys(self.ahead, self._beyond_short)

    def left_by(self, tenant: str) -> int:
        """Query tokens that the sequences of a tenant leave in the step that is planned."""
        return self._left_by.get(tenant, 0)

    def num_unplanned(self) -> int:
        """Running sequences of tenants that are not ahead that the step has still to plan."""
        return sum(not running.planned and running.tenant not in self.ahead for running in self._queues.running)

    def spare(self, left_out: set[str], used: int, context_tokens: int) -> int:
        """Query tokens that tenants leave in a step that uses so many without them: it gets longer by `SPARE` at most."""
        if not used:
            return 0
        spared = self._budget.buckets[-1] - self._budget.bucket_within(SPARE, used, context_tokens)
        self._left_by |= {tenant: max(spared, self._left_by[tenant]) for tenant in left_out}
        return spared

    def used(self, tenant: str) -> float:
        """Token·seconds over its weight that a tenant has used beyond its share while it was not alone."""
        return max(0.0, self._used.get(tenant, 0.0) - self._share)

    def service_order(self) -> list[Sequence]:
        """The running sequences: each tenant's oldest, by arrival; behind them the others, by their tenant's use.

        Its last one is preempted when a device slot is lacking; its first one is the oldest of all tenants.
        """
        return sorted(self._queues.running, key=self._rank)

    def last_served(self) -> Sequence:
        """The last sequence of the service order."""
        return max(self._queues.running, key=self._rank)

    def query_tokens(
        self, order: list[Sequence], total: int, spared: int, computable: Callable[[Context, int], int]
    ) -> dict[str, int]:
        """Shares of a step's query tokens, by sequence id: one each, the rest for prompts by their tenant's use.

        Args:
            order: the running sequences that are still to be planned.
            total: query tokens of the step that are left.
            spared: how many of them these sequences leave.
            computable: tokens of a context, up to a length, that can be computed before any page is fetched.
        """
        rest = total - spared - len(order)
        shares = {}
        for sequence in sorted(order, key=lambda sequence: (self.used(sequence.tenant), sequence.order)):
            num_computable = computable(sequence.context, sequence.length - 1)
            num_tokens = max(0, min(num_computable, rest - max(0, self.left_by(sequence.tenant) - spared)))
            shares[sequence.id] = 1 + num_tokens
            rest -= num_tokens
        return shares

    def leaves_out(self, order: Iterable[Sequence], started: Iterable[Sequence]) -> set[str]:
        """Tenants whose sequences get what a step has to spare, since it runs a sequence of a tenant that they are ahead of.

        Args:
            order: the running sequences that are still to be planned.
            started: those that the step starts.
        """
        self._num_left_out = (self._num_left_out + 1) % LEFT_OUT_STEPS
        if not (self.ahead and self._num_left_out):
            return set()
        tenants = {sequence.tenant for sequence in (*order, *started)}
        least = min([self.used(tenant) for tenant in tenants], default=math.inf) + (AHEAD_S * self._held or math.inf)
        return {tenant for tenant in tenants if self.used(tenant) >= least}

    def next_waiting(self) -> Sequence | None:
        """The waiting sequence that starts next: by priority, tenants without a running sequence first, then by use."""
        heads = [(self._start_rank(tenant, queue, head), head) for tenant, queue, head in self._heads()]
        return min(heads, key=lambda entry: entry[0])[1] if heads else None

    def entitled(self, refused: Container[str]) -> Sequence | None:
        """The waiting sequence whose tenant has the first right to a slot.

        Args:
            refused: tenants that are left out.
        """
        heads = [
            (self._start_rank(tenant, queue, head), head)
            for tenant, queue, head in self._heads()
            if tenant not in refused
            and (
                (not queue.running and self._has_floor(head))
                or self._above(tenant, head, pages=False)
                or self._above(tenant, head, pages=True)
            )
        ]
        return min(heads, key=lambda entry: entry[0])[1] if heads else None

    def victim(self, head: Sequence, *, pages: bool) -> Sequence | None:
        """The running sequence that is preempted now for a tenant's right; None if no tenant is above its share.

        It is not planned yet, it has computed since it was started, or two would bring their contexts to the device in turn for
        ever, and it is its tenant's oldest only if that tenant is ahead.

        Args:
            head: the tenant's waiting sequence.
            pages: it lacks pages; else it lacks a slot.
        """
        above = self._above(head.tenant, head, pages=pages)
        victims = [
            sequence
            for name in above
            for sequence in self._queues.by_tenant[name].running[0 if self._yields(name, head.tenant) else 1 :]
            if not sequence.planned and sequence.row.num_pages
        ]
        victim = max(victims, key=self._rank, default=None)
        if victim is not None and victim is self._queues.by_tenant[victim.tenant].running[0]:
            self._gave_way[victim.tenant] = self._at_s
        return victim

    def _lead(self, tenant: str, rival: str) -> float:
        """How much more a tenant has used than another one, 1 being `AHEAD_S` seconds of all that runs."""
        return (self.used(tenant) - self.used(rival)) / (AHEAD_S * self._held or math.inf)

    def _yields(self, tenant: str, rival: str) -> bool:
        """Whether a tenant's oldest sequence gives way to another tenant that it is ahead of."""
        return tenant not in self._gave_way and self._lead(tenant, rival) >= 1.0

    def _above(self, tenant: str, head: Sequence, *, pages: bool) -> list[str]:
        """Tenants that this one's right is measured against: all that run several sequences, if this one runs none."""
        queues = self._queues.by_tenant
        own = queues[tenant].running
        rivals = [
            (name, queue.running)
            for name, queue in queues.items()
            if name != tenant and (len(queue.running) > 1 or (queue.running and self._yields(name, tenant)))
        ]
        if not own:
            floor, gave_way = self._has_floor(head), self._gave_way_lately(tenant)
            return [
                name
                for name, running in rivals
                if (floor or head.weight >= running[0].weight or self._lead(name, tenant) >= 0.0)
                and not (gave_way and self._lead(tenant, name) >= 1.0)
            ]
        size, more = (_num_tokens, head.length) if pages else (_num_running, 1)
        least = size(own) + more / head.weight
        return [
            name
            for name, running in rivals
            if (lead := self._lead(name, tenant)) >= 0.0
            and (lead >= 1.0 or size(running) * (1.0 / RIGHT + lead) >= least)
        ]

    def _has_floor(self, head: Sequence) -> bool:
        """Whether a tenant has a right to one running sequence whatever it has used: none weighs more, or its share is one, and
        its last one has not given way just now."""
        share = head.weight >= self._most_weight or head.weight * len(self._queues.running) >= self._weights
        return share and not self._gave_way_lately(head.tenant)

    def _gave_way_lately(self, tenant: str) -> bool:
        return self._gave_way.get(tenant, -math.inf) > self._at_s - AHEAD_S

    def _heads(self) -> list[tuple[str, TenantQueue, Sequence]]:
        """Each tenant's first waiting sequence that does not wait for its leader."""
        return [
            (tenant, queue, head)
            for tenant, queue in self._queues.by_tenant.items()
            if (head := next((waiting for waiting in queue.waiting if waiting.may_start), None)) is not None
        ]

    def _start_rank(self, tenant: str, queue: TenantQueue, head: Sequence) -> tuple[int, bool, float, int]:
        return head.priority, bool(queue.running) or not self._has_floor(head), self.used(tenant), head.order

    def _rank(self, sequence: Sequence) -> Rank:
        oldest = self._queues.by_tenant[sequence.tenant].running[0] is sequence
        return (
            (False, 0, 0.0, sequence.order)
            if oldest
            else (True, sequence.priority, self.used(sequence.tenant), sequence.order)
        )


def _num_tokens(running: list[Sequence]) -> float:
    """Tokens of context, each over its tenant's weight."""
    return sum([sequence.length / sequence.weight for sequence in running])


def _num_running(running: list[Sequence]) -> float:
    """Sequences, each over its tenant's weight."""
    return sum([1.0 / sequence.weight for sequence in running])


def work_before(load: EngineLoad, request: QueuedWork) -> tuple[float, float, float]:
    """Tokens of context, tokens to be computed and number of the waiting requests that go before a new one.

    By the time that a tenant of weight `w` is served `x` tokens, one of weight `v` is served `min(its backlog, x · v / w)`.
    """
    backlogs = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0, 1.0])
    for queued in load.queued:
        if queued.priority <= request.priority:
            backlog = backlogs[queued.tenant]
            backlog[0] += queued.num_tokens
            backlog[1] += queued.uncomputed
            backlog[2] += 1
            backlog[3] = queued.weight
    own = backlogs.pop(request.tenant, [0.0, 0.0, 0.0, request.weight])
    served = (own[0] + request.num_tokens) / request.weight
    sums = own[:3]
    for tokens, *counts, weight in backlogs.values():
        share = min(1.0, served * weight / tokens)
        sums = [before + share * number for before, number in zip(sums, (tokens, *counts), strict=True)]
    return sums[0], sums[1], sums[2]


def has_right_to_memory(load: EngineLoad, request: QueuedWork) -> bool:
    """Whether the tenant of a new request may take memory from another one at once, as far as a load tells."""
    running, _ = load.running_by_tenant.get(request.tenant, (0.0, 0))
    waiting = sum([queued.num_tokens for queued in load.queued if queued.tenant == request.tenant])
    least = RIGHT * (running + (waiting + request.num_tokens) / request.weight)
    rivals = [of for name, of in load.running_by_tenant.items() if name != request.tenant]
    return any(count > 1 and (tokens >= least or not (running or waiting)) for tokens, count in rivals)
