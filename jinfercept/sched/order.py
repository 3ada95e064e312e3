"""The `Order` protocol: which waiting sequence starts next.

Waiting sequences are new, or their calls have returned, or they were preempted. First come first served, by original arrival,
is the default and needs no order. Under an `Order` they start by ascending keys, with two exceptions that the scheduler makes
itself: a smaller `priority` goes before every key, and a sequence that has waited for `queues.LONGEST_S` goes before every key
of its priority. While tenants compete, the order applies within each tenant. No order preempts running sequences.

While one tenant is served, running sequences that lack more than one token get their chunks in the same order: one whose prompt
is being computed keeps its pages and its slot while sequences with smaller keys start and are computed before it.
"""

from abc import abstractmethod
from typing import Protocol

from jinfercept.sched.sequence import Sequence


class Order(Protocol):
    """Ranks waiting sequences. A class of your own inherits from it, or has all of its members.

    It relies on this: the calls come from one thread, in the order in which things happen; `now` never falls; a sequence has a
    key before it starts. It reads sequences and writes to none, and blocks on nothing. A key is asked for in every plan for a
    running sequence that lacks more than one token; for a waiting one when it begins to wait, and then again for
    `queues.REFRESHED` waiting sequences per plan, in turn, so that a plan costs the same
    whether ten or ten thousand wait: it may depend on time, but slowly.
    """

    @abstractmethod
    def key(self, sequence: Sequence, now: float) -> float:
        """A finite number: of the sequences of one priority, the one with the least starts next; equal ones by arrival."""
        ...

    def intercepted(self, sequence: Sequence) -> None:
        """A sequence waits for its `calls` from now on; its state is that before. Ignored unless overridden."""
        return

    def finished(self, sequence: Sequence) -> None:
        """A sequence ends, in whatever state it is; its state is that before. Ignored unless overridden."""
        return
