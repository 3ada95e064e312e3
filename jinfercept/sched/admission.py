"""Starts waiting sequences where the device has slots for their whole contexts. Orders nothing."""

from functools import partial
from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.plan_builder import PlanBuilder
from jinfercept.sched.policy import Policy
from jinfercept.sched.position_price import PositionPrice
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.step_budget import StepBudget
from jinfercept.sched.waste import chunk_tokens, chunked_discard_waste, preserve_waste

MOST_HELD_BACK_S = 2.0
"""Seconds for which paused contexts hold back one new request; the next one then waits as long at most."""


@final
class Admission:
    """Turns waiting sequences into running ones.

    Args:
        kv: the pages.
        policy: says which pages of paused contexts a request that starts may not take.
        budget: prices steps, and says what the link moves.
        recomputes_late: see `Policy`.
    """

    def __init__(
        self,
        kv: KVManager,
        queues: Queues,
        policy: Policy,
        budget: StepBudget,
        *,
        recomputes_late: bool,
    ) -> None:
        self._kv, self._queues, self._policy = kv, queues, policy
        self._held_back: tuple[Sequence, float] | None = None  # a new sequence, and since when
        self._recomputes_late = recomputes_late
        self._cost, self._largest, self._page_size = budget.cost, budget.buckets[-1], kv.page_size
        self._price = PositionPrice(budget.cost, self._largest)

    def admit(self, builder: PlanBuilder, sequence: Sequence, *, entitled: bool = False) -> bool:
        """Start a waiting sequence, if the device has slots for its whole context; False if not.

        Args:
            entitled: its tenant is below its share, so that no paused context holds slots against it.
        """
        kv, context = self._kv, sequence.context
        kv.step_back(context, sequence.length)  # a state that has seen the last token cannot give its logits again
        if not sequence.wants_computation:
            kv.refresh(context, sequence.tokens)
        kv.hold(context)
        has_room = not self._queues.running or self._has_room(sequence, builder.now, entitled=entitled)
        if not has_room:
            kv.release(context)
            if not sequence.max_computed:
                kv.close(context)  # all its pages are shared ones: they stay cached prefixes
            return False
        self._queues.run(sequence)
        sequence.planned = False
        builder.context_tokens += sequence.length
        ran_before = sequence.max_computed > 0
        if not ran_before:
            sequence.max_computed = context.num_pages * kv.page_size
        sequence.usage.start(context.residency(sequence.max_computed))
        if ran_before and sequence.usage.residency.host and self._recomputes_late:
            self._drop_late(builder, sequence)
        self._policy.resume(sequence, builder.now)
        return True

    def _drop_late(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Drop the host copies of a sequence that runs again if to recompute them takes less time, at their positions, and
        wastes less than to wait for the link."""
        num_tokens = self._kv.num_fetchable(sequence.context) * self._page_size
        before = sum([self._fetched_first(other) for other in self._queues.running if other is not sequence])
        link_tokens_per_s = max(1, self._cost.link_tokens(1.0))
        wait_s = (before + num_tokens) / link_tokens_per_s
        waiting = preserve_waste(wait_s, sequence.length)
        chunk = chunk_tokens(self._largest, len(self._queues.running), self._page_size)
        other_tokens = builder.context_tokens - sequence.length
        forward_s = partial(self._cost.step_s, context_tokens=0)
        if chunked_discard_waste(num_tokens, other_tokens, chunk, forward_s) < waiting:
            fetchable = self._kv.fetchable(sequence.context)
            if sum([self._price.between_s(start, end) for start, end in fetchable]) < wait_s:
                self._kv.drop_fetchable(sequence.context)

    def _fetched_first(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that the link has still to bring."""
        context = sequence.context
        return 0 if context.ready >= sequence.length - 1 else self._kv.num_fetchable(context) * self._page_size

    def _has_room(self, sequence: Sequence, now: float, *, entitled: bool) -> bool:
        """Whether the device has slots for a sequence beside the running ones, and a page more for each of these."""
        lengths = (other.length for other in (sequence, *self._queues.running))
        for pool in self._kv.side_pools:
            if not pool.have_room(lengths, self._largest, beside_paused=self._policy.protects_paused):
                return False
        num_free = self._kv.num_available - self._slots_needed(sequence)
        num_free -= sum([self._slots_needed(other) + 1 for other in self._queues.running])
        if num_free >= 0:
            return True
        if self._policy.protects_paused:
            return False
        num_free += self._kv.num_paused
        if num_free < 0 or entitled or sequence.max_computed:
            return num_free >= 0
        return self._policy.held_pages(num_free + 1, now) <= num_free or self._waited_long(sequence, now)

    def _waited_long(self, sequence: Sequence, now: float) -> bool:
        """Whether paused contexts have held back a new sequence, the first of those that wait, for `MOST_HELD_BACK_S`."""
        if self._held_back is None or self._held_back[0] is not sequence:
            self._held_back = sequence, now
        return now - self._held_back[1] >= MOST_HELD_BACK_S

    def _slots_needed(self, sequence: Sequence) -> int:
        """Device slots that the sequence still lacks for the tokens it has and the next one."""
        context, length = sequence.context, sequence.length
        return 0 if context.ready >= length - 1 else self._kv.slots_needed(context, length + 1)
