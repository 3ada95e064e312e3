"""Where new conversations wait until those that are inside leave room for their contexts. Orders nothing, plans nothing.

A conversation is one that a follow-up request may extend. It is inside from the moment that the door lets it in, and whatever
its later requests do: none of them waits here again. What keeps its turns short is that its context stays in memory between
them. So a new conversation comes in while its prompt fits in the device's and the host's pool together, beside the contexts
of those inside that run, wait, or have paused for less than `IDLE_S`. A tool that never answers therefore holds up none of
those at the door for longer. A tenant that has no such conversation inside has a right to one, and among tenants the one with
the fewest tokens inside over its weight comes first.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence, State

Overload = Literal["queue", "refuse", "serve"]

IDLE_S = 60.0
"""Seconds of a pause after which a context is not expected to be in memory still: most tools answer sooner."""
LOOK_S = 0.1
"""Seconds between two looks for room."""


@final
class Door:
    """The conversations that wait at the door of one scheduler.

    Args:
        is_open: it lets in all, whatever room there is.

    Attributes:
        sequences: the first requests of these conversations, in the order in which they come in.
    """

    def __init__(self, kv: KVManager, queues: Queues, is_open: bool) -> None:
        self._is_open = is_open
        self.sequences: list[Sequence] = []
        self._queues, self._page_size = queues, kv.page_size
        pools = kv.occupancy()
        self._capacity = (pools.total + pools.host_total) * kv.page_size
        self._next_look_s = 0.0

    def add(self, sequence: Sequence) -> None:
        """A new conversation comes to the door. The next look decides whether it waits."""
        sequence.at_door = True
        self.sequences.append(sequence)
        self._next_look_s = 0.0

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends, and waits here no more."""
        self.sequences.remove(sequence)

    def open(self, now: float) -> None:
        """Let in whom there is room for. For every plan, first."""
        if not self.sequences or now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        inside = defaultdict[str, int](int)  # tokens by tenant
        for sequence in self._inside(now):
            inside[sequence.tenant] += sequence.length
        self.sequences.sort(key=lambda sequence: (sequence.priority, sequence.since_s))
        while self.sequences:
            first = min(self.sequences, key=lambda sequence: (sequence.priority, inside[sequence.tenant] / sequence.weight))
            if not self._is_open and inside[first.tenant] and sum(inside.values()) + first.length > self._capacity:
                return
            self.sequences.remove(first)
            first.at_door, first.door_s, first.since_s = False, now - first.arrival_s, now
            self._queues.put_last(first)
            inside[first.tenant] += first.length

    def _inside(self, now: float) -> Iterator[Sequence]:
        queues = self._queues
        yield from queues.running
        yield from queues.waiting
        for sequence in queues.intercepted.values():
            if now - sequence.paused_s < IDLE_S:
                yield sequence
