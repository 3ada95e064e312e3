"""The default policy: `lru_host`, but no page is lost that can be kept.

`lru_host` copies contexts to the host as the link allows, and takes slots from the context that has been paused longest. This
policy makes the same copies, and evicts contexts in the same order. It copies running contexts while another one is paused and
half of the device is in use: a batch whose requests neither pause nor wait is not slowed down by copies that no one needs.
It differs where memory is too short for all of them:

1. A device slot is taken where nothing is lost: pages that have a host copy, or get one now, go first. While the link or the
   host is full, such pages of contexts that were paused later go, too.
2. A host slot is taken from a page that is also on the device, of the context that was paused last.
3. While no request waits, a copy that no slot waits for takes the host slot of no other. All contexts are served soon then, so
   that none is worth more than another. Under load those are served that have lost least, and these were paused last.

Where there is no host, or a host with room for all, both policies do the same. How long calls will last is not asked: to take
host slots from the context that is needed last, by durations of earlier calls, made turns wait longer in overload.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LOOKS = 2
"""Running contexts whose pages a plan copies: it costs the same however many there are."""


@final
class CopyAhead(Policy):
    """See the module."""

    def __init__(self) -> None:
        self._lru_host = LeastRecentlyUsed(writes_through=True, looks=LOOKS)
        self._paused: dict[str, Sequence] = {}  # longest paused first
        self._intercepted = set[str]()
        self._displaces = True  # copies may take host slots of others

    def pause(self, sequence: Sequence, now: float) -> None:
        self._lru_host.pause(sequence, now)
        self._paused.pop(sequence.id, None)
        self._paused[sequence.id] = sequence
        if sequence.state is State.INTERCEPTED:
            self._intercepted.add(sequence.id)

    def wait(self, sequence: Sequence) -> None:
        self._intercepted.discard(sequence.id)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._lru_host.resume(sequence, now)
        self._paused.pop(sequence.id, None)
        self._intercepted.discard(sequence.id)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._displaces = len(self._paused) > len(self._intercepted)
        self._lru_host.moves(budget, now, mover)
        self._displaces = True

    def victims(self, now: float) -> Iterator[Move]:
        """Rule 1, and then pages that are lost."""
        for move in self._lru_host.victims(now):
            yield move._replace(action=Action.OFFLOAD)
        yield from self._lru_host.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Rules 2 and 3."""
        if not self._displaces:
            return
        for other in takewhile(lambda other: other is not sequence, reversed(list(self._paused.values()))):
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        yield from self._lru_host.host_victims(sequence, now)
