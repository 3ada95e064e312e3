"""Bélády's clairvoyant policy with the pools that there are: the bound that memory allows, and no product.

It knows when every context is wanted again (`--estimator oracle`, in simulations), and which never are. On the device are those
that are wanted first, on the host those that are wanted next; the others are lost, the one that is wanted last first. What
was evicted is brought back before it is wanted. Nothing but the time of return counts, not what a page costs.
"""

from collections.abc import Iterator

from examples.rivals.host_tier import HostTier, Rank, device_pages, host_tokens
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover
from jinfercept.sched.sequence import Sequence, State

AHEAD = 0.25
"""Share of the device that is copied to the host ahead of its eviction."""
NEVER_S = 1e8
"""Seconds from which on a return is none."""
LEAD = 2.0
"""Seconds of its transfer that a context is brought back ahead of its return."""


class Belady(HostTier):
    """Loses the context that is wanted last first, its first tokens first: they cost least to compute again."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self._copying_ahead = False

    def back_s(self, sequence: Sequence) -> float:
        """When a paused sequence is wanted again."""
        return sequence.paused_s + max((call.expected_s or 0.0 for call in sequence.awaited), default=0.0)

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (-self.back_s(sequence),)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Copy what will be evicted next; then bring back what is wanted next."""
        self.plan(now)
        self.pools = budget.pools
        lost_first = self.lost_first(self.paused.values(), now)
        left = AHEAD * self.pools.total
        self._copying_ahead = True
        for sequence in lost_first:
            if left <= 0 or ((num_pages := device_pages(sequence)) and not mover.copy(sequence, "copy ahead")):
                break
            left -= num_pages
        self._copying_ahead = False
        for sequence in reversed(lost_first):
            tokens = host_tokens(sequence)
            if not tokens or sequence.state is not State.INTERCEPTED:
                continue
            if self.back_s(sequence) - now > LEAD * self.inputs.cost.swap_s(tokens):
                continue
            self.make_room(sequence, lost_first[: lost_first.index(sequence)], mover)
            if not mover.fetch(sequence, "wanted next"):
                return

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in self.lost_first(self.paused.values(), now):
            if device_pages(sequence):
                yield Move(sequence, range(sequence.context.num_pages), Action.SWAP, "wanted last")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Copies of what is still on the device and wanted before the sequence; then contexts that are wanted after it."""
        lost_first = self.lost_first(self.paused.values(), now)
        for other in reversed(lost_first):
            if other is sequence:
                break
            for run in other.context.runs():
                if run.residency.on_device and run.residency.on_host:
                    yield Move(other, run.pages, Action.UNCOPY, "it is on the device")
        for other in lost_first:
            if other is sequence or other.state is not State.INTERCEPTED:
                return
            if not self._copying_ahead or self.back_s(other) - now > NEVER_S:
                yield Move(other, range(other.context.num_pages), Action.UNCOPY, "wanted later")
