"""What the scheduler reports of its sequences; `engine.meter.request_log` makes events of it. An observer decides nothing."""

from typing import Protocol

from jinfercept.kv.context import PageRun
from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence


class Observer(Protocol):
    """Called after every change of state and every move. Reads its own clock."""

    def changed(self, sequence: Sequence) -> None:
        """The sequence's state has changed. `sequence.preemptions` tells a preemption from a return."""
        ...

    def moved(self, move: Move, run: PageRun, copied_tokens: int, freed: int) -> None:
        """A policy's move of pages that are alike was executed, as far as the pages allowed.

        `run` has the pages as they were before, `copied_tokens` move to the host for them, and `freed` device slots are free
        now.
        """
        ...
