"""Starts waiting sequences where the device has slots for their whole contexts. Orders nothing."""

from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.door import Door
from jinfercept.sched.plan_builder import PlanBuilder
from jinfercept.sched.policy import Policy
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence


@final
class Admission:
    """Turns waiting sequences into running ones.

    Args:
        kv: the pages.
        policy: says whether a request that starts may take slots of paused contexts.
        largest: query tokens of the largest step.
    """

    def __init__(self, kv: KVManager, queues: Queues, door: Door, policy: Policy, largest: int) -> None:
        self._kv, self._queues, self._door, self._policy, self._largest = kv, queues, door, policy, largest

    def admit(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Start a waiting sequence, if the device has slots for its whole context; False if not."""
        kv, context = self._kv, sequence.context
        kv.step_back(context, sequence.length)  # a state that has seen the last token cannot give its logits again
        if not sequence.wants_computation:
            kv.refresh(context, sequence.tokens)
        kv.hold(context)
        has_room = not self._queues.running or self._has_room(sequence)
        if not has_room:
            kv.release(context)
            if not sequence.max_computed:
                kv.close(context)  # all its pages are shared ones: they stay cached prefixes
            return False
        self._queues.run(sequence)
        sequence.planned = False
        builder.context_tokens += sequence.length
        if not sequence.max_computed:
            sequence.max_computed = context.num_pages * kv.page_size
        sequence.usage.start(context.residency(sequence.max_computed))
        self._door.started(sequence, builder.now)
        self._policy.resume(sequence, builder.now)
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the device has slots for a sequence beside the running ones, and a page more for each of these."""
        for pool in self._kv.side_pools:
            lengths = [other.length for other in (sequence, *self._queues.running)]
            if not pool.have_room(lengths, self._largest, beside_paused=self._policy.protects_paused):
                return False
        num_free = self._kv.num_available - self._slots_needed(sequence)
        num_free -= sum([self._slots_needed(other) + 1 for other in self._queues.running])
        if not self._policy.protects_paused:
            num_free += self._kv.num_paused
        return num_free >= 0

    def _slots_needed(self, sequence: Sequence) -> int:
        """Device slots that the sequence still lacks for the tokens it has and the next one."""
        context, length = sequence.context, sequence.length
        return 0 if context.ready >= length - 1 else self._kv.slots_needed(context, length + 1)
