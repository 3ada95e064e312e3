"""Fairness among tenants that compete for slots, pages and query tokens: virtual token counters. Reads no clock.

The rule is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, section 4). A tenant's counter is
the number of tokens computed for it, divided by its weight. The tenant with the least counter is served next. A tenant that
becomes active is lifted to the least counter of the active ones, so that idle time saves nothing.

In addition, a tenant without a running sequence has a right to one, unless its counter is larger than those of the others.
"""

from collections.abc import Container
from typing import final

from jinfercept.sched.queues import Queues, Rank
from jinfercept.sched.sequence import Sequence


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
