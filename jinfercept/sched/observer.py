"""Who wants to know what a scheduler does: decision records, trace exports, studies. An observer decides nothing."""

from typing import Protocol, final

from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence


class Observer(Protocol):
    """Told of what has just been done. What time it is, it asks its own clock."""

    def changed(self, sequence: Sequence) -> None:
        """The sequence's state is another one than before; `sequence.preemptions` tells a preemption from a return."""
        ...

    def moved(self, move: Move, copied_tokens: int, freed: bool) -> None:
        """A policy's move was executed, as far as the page allowed.

        Args:
            move: the page, its sequence, and why.
            copied_tokens: what the link carries to the host for it; 0 if nothing.
            freed: its device slot is free now.
        """
        ...


@final
class Observers:
    """Several, told in turn.

    Args:
        parts: who is told.
    """

    def __init__(self, *parts: Observer) -> None:
        self._parts = parts

    def changed(self, sequence: Sequence) -> None:
        """See `Observer`."""
        for part in self._parts:
            part.changed(sequence)

    def moved(self, move: Move, copied_tokens: int, freed: bool) -> None:
        """See `Observer`."""
        for part in self._parts:
            part.moved(move, copied_tokens, freed)
