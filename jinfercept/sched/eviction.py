"""Frees device slots while a plan is built. Runs nothing.

A slot comes from the free ones; else from a finished prefix; else from a paused context, in the policy's order; else from a
preempted one; at last from the running sequence that is served last.
"""

from typing import final

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.sched.fairness import FairShare
from jinfercept.sched.plan_builder import MoveOrder, PlanBuilder, SchedulerCounters
from jinfercept.sched.policy import Action, Policy
from jinfercept.sched.preemption import PreemptedSequences
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.transfers import Transfers


@final
class Eviction:
    """Device slots for the plan being built, at the cost of paused contexts and of running sequences."""

    def __init__(
        self,
        kv: KVManager,
        queues: Queues,
        fair: FairShare,
        policy: Policy,
        transfers: Transfers,
        counters: SchedulerCounters,
        preempted: PreemptedSequences,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._fair = fair
        self._policy = policy
        self._transfers = transfers
        self._counters = counters
        self._preempted = preempted

    def free_slot(self, builder: PlanBuilder, sequence: Sequence, most: int, position: int) -> bool:
        """Free a device slot for a running sequence, up to `most` if paused contexts have as many; False: it must wait."""
        # `position` is the sequence's first token to compute that has no page
        running, may_evict, context = self._queues.running, not self._policy.protects_paused, sequence.context
        if self._kv.free_slot(context, position) or (may_evict and self._evict(builder, most, context, position)):
            return True
        while running:
            last = self._fair.service_order()[-1] if builder.tenants_compete else running[-1]
            if last is sequence or last.planned:
                break
            self.preempt(builder, last)
            if self._kv.free_slot(context, position) or (may_evict and self._evict(builder, most, context, position)):
                return True
        if running[0] is sequence and not may_evict and self._evict(builder, most, context, position):
            return True
        builder.stalled = True
        return False

    def preempt(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Send a running sequence back to the waiting queue, and move its pages as `preemption` says."""
        self.set_aside(sequence, builder.now)
        builder.victims = None
        if self._preempted.how == "policy":
            self._transfers.move_paused(builder)
        elif self._preempted.how != "auto":
            action = Action.SWAP if self._preempted.how == "swap" else Action.LOSE
            self._transfers.force_out(builder, sequence, action)

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Send a running sequence back to the waiting queue; its pages stay and may be evicted."""
        self._queues.wait(sequence)
        self._kv.release(sequence.context)
        self._counters.preempt(sequence)
        if self._preempted.how == "auto":
            self._preempted.add(sequence)
        elif self._preempted.how == "policy":
            self._policy.pause(sequence, now)

    def _evict(self, builder: PlanBuilder, most: int, context: Context | None = None, position: int = 0) -> bool:
        if not self._kv.num_paused:
            return self._kv.evict_side(context, position) > 0
        if self._take(builder, most):
            return True
        builder.victims = MoveOrder(self._policy.victims(builder.now))
        if self._take(builder, most):
            return True
        for victim in self._preempted.victims():
            if self._transfers.force(builder, victim.move, max(most, victim.together)).freed:
                return True
        return self._kv.evict_paused(most) > 0 or self._kv.evict_side(context, position) > 0

    def _take(self, builder: PlanBuilder, most: int) -> int:
        freed, victims = 0, builder.victims
        for move in victims or ():
            slots, rest = self._transfers.move(builder, move, most - freed)
            freed += slots
            if freed >= most:
                if rest and victims is not None:
                    victims.put_back(move._replace(pages=rest))
                break
        return freed
