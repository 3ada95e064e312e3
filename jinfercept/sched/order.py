"""The `Order` protocol: which waiting sequence starts next.

Waiting sequences are new, were preempted, or have calls that returned. By default they start by original arrival, first come
first served, and need no order. Under an `Order` they start by ascending keys. The scheduler makes two exceptions: a smaller
`priority` goes before every key, and a sequence that has waited for `queues.LONGEST_S` goes before every key of its priority.
While tenants compete, the order applies within each tenant. No order preempts running sequences.

While one tenant is served, running sequences that lack more than one token get their chunks in the same order. A sequence
whose prompt is being computed keeps its pages and its slot while sequences with smaller keys go before it.
"""

from abc import abstractmethod
from typing import Protocol

from jinfercept.sched.sequence import Sequence


class Order(Protocol):
    """Ranks waiting sequences. Inherit from it, or write a class with all of its members.

    An order can rely on this: calls come from one thread, in the order of events; `now` never falls; a sequence has a key
    before it starts. An order reads sequences, writes to none, and blocks on nothing.

    Every plan asks for the key of a running sequence that lacks more than one token. The key of a waiting sequence is asked
    for when its wait begins, and then again for `queues.REFRESHED` waiting sequences per plan, in turn, so that a plan costs
    the same whether ten or ten thousand wait. So a key may depend on time, but slowly.
    """

    @abstractmethod
    def key(self, sequence: Sequence, now: float) -> float:
        """A finite number. Of sequences with the same priority, the least key starts next; equal keys go by arrival."""
        ...

    def intercepted(self, sequence: Sequence) -> None:
        """A sequence begins to wait for its `calls`; `state` is still the one before. Ignored unless overridden."""
        return

    def finished(self, sequence: Sequence) -> None:
        """A sequence ends, in any state; `state` is still the one before. Ignored unless overridden."""
        return
