"""The default policy: `lru_host`, but no page is lost that can be kept.

Like `lru_host`, it copies contexts to the host as the link allows, and evicts the context that has been paused longest. Three
rules, in the code below, differ where memory is too short for all contexts. Without a host, or with a host that holds all
contexts, both policies do the same.

The policy ignores how long calls are expected to last. Taking host slots from the context that is needed last, by the
durations of earlier calls, made turns wait longer in overload.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LOOKS = 2
"""Running contexts whose pages one plan copies. The limit makes a plan cost the same however many contexts run."""


@final
class CopyAhead(Policy):
    def __init__(self) -> None:
        # Running contexts are copied only while another one is paused and half of the device is in use: a batch whose
        # requests neither pause nor wait is not slowed down by copies that are never needed.
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
        # Rule 1: take a device slot where nothing is lost. Pages that have a host copy, or get one now, go first; while the
        # link or the host is full, also such pages of contexts that were paused later.
        for move in self._lru_host.victims(now):
            yield move._replace(action=Action.OFFLOAD)
        yield from self._lru_host.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        # Rule 3: while no request waits, a copy that no slot waits for takes no other copy's host slot. All contexts are
        # served soon then, so that none is worth more than another. Under load the contexts that have lost least are served
        # first, and those were paused last.
        if not self._displaces:
            return
        # Rule 2: take a host slot from a page that is also on the device, of the context that was paused last.
        for other in takewhile(lambda other: other is not sequence, reversed(list(self._paused.values()))):
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        yield from self._lru_host.host_victims(sequence, now)
