"""Continuum's time-to-live (Li et al., arXiv 2511.02230) as a policy of your own.

A context that is paused for a tool is pinned for a time-to-live; once that is over it is swapped out. The time-to-live is
chosen by the tool's durations so far, against the seconds that a return without a context costs: loading or computing it again,
and the wait for room that evicted contexts have had. As everywhere here, requests keep their place by original arrival.
"""

from collections.abc import Iterator

from jinfercept.kv.page import Residency
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

SMOOTHING = 0.1
"""Weight of the last wait in the mean wait."""


class TimeToLive(Policy):
    """Pins a paused context for a time-to-live, then swaps it out.

    Args:
        known: prices of the machine, and the estimator of durations.
    """

    protects_paused = True  # no context is evicted before its time is over, while any sequence runs

    def __init__(self, known: PolicyInputs) -> None:
        self.known = known
        self.paused: dict[str, Sequence] = {}  # with pages on the device
        self.until_s: dict[str, float] = {}  # when the time of a paused context is over
        self.returned_s: dict[str, float] = {}  # when the calls of an evicted context returned
        self.wait_s = 0.0  # mean of such a context's wait, beyond its transfer
        self.now = 0.0

    def pause(self, sequence: Sequence, now: float) -> None:
        self.paused[sequence.id] = sequence
        intercepted = sequence.state is State.INTERCEPTED
        self.until_s[sequence.id] = sequence.paused_s + self.ttl_s(sequence) if intercepted else now

    def wait(self, sequence: Sequence) -> None:
        if not all(run.residency.on_device for run in sequence.context.runs()):
            self.returned_s[sequence.id] = self.now
        self.until_s[sequence.id] = float("inf")  # it will run as soon as it can

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)
        self.until_s.pop(sequence.id, None)
        returned_s = self.returned_s.pop(sequence.id, None)
        if returned_s is not None:
            self.wait_s += SMOOTHING * (now - returned_s - self.wait_s)

    def ttl_s(self, sequence: Sequence) -> float:
        """The τ of least E[min(X, τ)] + B·P(X > τ), for a tool's durations X and B seconds of returning without a context."""
        context = len(sequence.tokens)
        reload_s = min(self.known.cost.swap_s(context), self.known.forward_s(context))
        estimator, back_s = self.known.estimator, reload_s + self.wait_s
        return max((estimator.hold_until_s(call, 1.0, back_s) for call in sequence.awaited), default=0.0)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self.now, link_tokens = now, budget.link_tokens
        for sequence in [sequence for sequence in self.paused.values() if self.until_s[sequence.id] <= now]:
            for run in reversed(sequence.context.runs()):
                pages = run.pages[::-1]
                if run.residency is Residency.DIRTY and sequence.state is State.INTERCEPTED:
                    pages = pages[: max(0, link_tokens) // self.known.page_size]
                    link_tokens -= len(pages) * self.known.page_size
                if run.evictable and pages:
                    mover.swap(sequence, "its time is over", pages)
                if len(pages) < run.num_pages:
                    return  # the link is busy: the next plan goes on; only a preempted sequence gives way at once
            if not any(run.residency.on_device for run in sequence.context.runs()):
                self.paused.pop(sequence.id, None)

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in sorted(self.paused.values(), key=lambda sequence: self.until_s[sequence.id]):
            yield Move(sequence, sequence.context.tail_first, Action.SWAP, "a slot is needed")
