"""What the scheduler tells of its sequences: `meter.request_log` makes events of it. An observer decides nothing."""

from typing import Protocol

from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence


class Observer(Protocol):
    """Called after every change of state and every move. Reads its own clock."""

    def changed(self, sequence: Sequence) -> None:
        """The sequence's state has changed; `sequence.preemptions` tells a preemption from a return."""
        ...

    def moved(self, move: Move, copied_tokens: int, freed: bool) -> None:
        """A policy's move was executed, as far as the page allowed.

        Args:
            move: the page, its sequence, and the reason.
            copied_tokens: tokens that the link moves to the host for it.
            freed: whether the page's device slot is free now.
        """
        ...
