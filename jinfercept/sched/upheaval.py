"""What concerns all sequences at once, with no plan in flight: other weights, and the device's pages gone."""

from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.eviction import Eviction
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence, State


@final
class Upheaval:
    """Takes pages from the sequences of one scheduler."""

    def __init__(self, kv: KVManager, queues: Queues, eviction: Eviction, counters: SchedulerCounters) -> None:
        self._kv, self._queues, self._eviction, self._counters = kv, queues, eviction, counters

    def change_weights(self, *, recompute: bool) -> None:
        """The weights are others now: finished prefixes are dropped, and what was never computed shares no older page.

        A page of older weights is worth nothing where it is to be computed again, whatever the waste equations say of its age:
        to hold it is waste alone, so it goes at once, on the device and on the host.

        Args:
            recompute: all sequences lose their pages. Those that ran wait again; intercepted ones do when they return.
        """
        self._kv.drop_prefixes(apart=True)
        everyone = [*self._queues.running, *self._queues.waiting, *self._queues.intercepted.values()]
        self._renew([sequence for sequence in everyone if recompute or not sequence.max_computed])

    def leave_device(self, now: float) -> None:
        """Give all device slots back. Running sequences wait again; all keep what the host has of them, but for those with
        windows or states, which are whole or lost."""
        for sequence in list(self._queues.running):
            sequence.void_pending()
            self._eviction.set_aside(sequence, now)
        self._kv.begin_plan()
        if self._kv.side_pools:
            self._renew([*self._queues.waiting, *self._queues.intercepted.values()])
        else:
            self._kv.leave_device()

    def _renew(self, sequences: list[Sequence]) -> None:
        """Empty the contexts of sequences. The first of those that wait with the same prompt computes it for the others."""
        for sequence in sequences:
            if sequence.state is State.RUNNING:
                sequence.void_pending()
                self._counters.preempt(sequence)
                self._queues.wait(sequence)
            self._kv.renew(sequence.context)
        self._kv.drop_prefixes()
        leaders: dict[tuple[str, bytes, bytes], Sequence] = {}
        waiting = [sequence for sequence in sequences if sequence.state is State.WAITING]
        for sequence in sorted(waiting, key=lambda sequence: sequence.order):
            prompt = sequence.tokens[: sequence.external_spans[0][1]].tobytes()
            leader = leaders.setdefault((sequence.tenant, sequence.context.root, prompt), sequence)
            sequence.leader = None if leader is sequence else leader
