"""Starts waiting sequences where the device has slots for their whole contexts. Orders and evicts nothing."""

from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.plan_builder import Counters, PlanBuilder
from jinfercept.sched.policy import Policy
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence


@final
class Admission:
    """Turns waiting sequences into running ones.

    Args:
        kv: the pages.
        queues: the sequences.
        policy: says which pages of paused contexts a request that starts may not take.
        counters: the tokens of contexts that run again are added here.
    """

    def __init__(self, kv: KVManager, queues: Queues, policy: Policy, counters: Counters) -> None:
        self._kv, self._queues, self._policy, self._counters = kv, queues, policy, counters

    def admit(self, builder: PlanBuilder, sequence: Sequence, *, entitled: bool = False) -> bool:
        """Start a waiting sequence, if the device has slots for its whole context; False if not.

        Args:
            entitled: its tenant is below its share, so that no paused context holds slots against it.
        """
        kv, context = self._kv, sequence.context
        if not sequence.wants_scores:
            kv.refresh(context, sequence.tokens)
        kv.hold(context)
        if self._queues.running and not self._has_room(sequence, builder.now, entitled=entitled):
            kv.release(context)
            if not sequence.max_computed:
                kv.close(context)  # all its pages are shared ones: they stay cached prefixes
            return False
        self._queues.run(sequence)
        sequence.planned = False
        builder.context_tokens += sequence.length
        ran_before = sequence.max_computed > 0
        if not ran_before:
            sequence.max_computed = len(context.pages) * kv.page_size
        sequence.residency = kv.survey(context, sequence.max_computed)
        if ran_before:
            self._counters.resumed += sequence.max_computed
            self._counters.kept += sequence.residency.device + sequence.residency.host
        if sequence.num_cached is None:
            sequence.num_cached = sequence.residency.device + sequence.residency.host
            sequence.retained = sequence.retained and sequence.residency
        self._policy.resume(sequence, builder.now)
        return True

    def _has_room(self, sequence: Sequence, now: float, *, entitled: bool) -> bool:
        """Whether the device has slots for a sequence beside the running ones, and a page more for each of these."""
        store = self._kv.store
        left = store.num_free + store.num_cached - self._slots_needed(sequence)
        left -= sum([self._slots_needed(other) + 1 for other in self._queues.running])
        if left >= 0:
            return True
        if self._policy.protects_paused:
            return False
        left += store.num_paused
        if left < 0 or entitled or sequence.max_computed:
            return left >= 0
        return self._policy.held_pages(left + 1, now) <= left

    def _slots_needed(self, sequence: Sequence) -> int:
        """Device slots that the sequence still lacks for the tokens it has and the next one."""
        context = sequence.context
        if context.ready >= sequence.length - 1:
            return 0
        wanted = sequence.length // self._kv.page_size + 1
        return self._kv.missing_slots(context) + max(0, wanted - len(context.pages))
