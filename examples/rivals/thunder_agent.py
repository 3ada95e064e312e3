"""ThunderAgent's pausing of programs (Kang et al., arXiv 2602.13692): a working set of whole sessions that fits the device.

While the tokens of the active programs exceed the device's, programs are paused: first those that wait for a tool, the smallest
first; then those that are served, which are paused at their next call. Requests of paused programs wait. As room comes back,
programs are resumed: those with a request that had one before, then new ones, then those that still wait for a tool, in each
group the smallest first. A large program may wait for as long as smaller ones come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from examples.rivals.host_tier import HostTier, Rank
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Budget, Mover
from jinfercept.sched.sequence import Sequence, State

BUFFER = 100
"""Tokens that every active program may grow by."""
LONGEST_S = 1800.0
"""Seconds after which a program is resumed whatever the device holds."""


class Phase(IntEnum):
    """What a program does; paused ones are resumed in this order."""

    REASONS = 0  # has a request, and had one before
    BEGINS = 1  # has its first request
    ACTS = 2  # waits for a tool, or for a person


@dataclass(slots=True)
class Program:
    """A session.

    Attributes:
        sequence: its last one.
        phase: what it does.
        paused_s: since when it is paused; None: it is active.
        marked: it is paused when its request ends or calls.
    """

    sequence: Sequence
    phase: Phase
    paused_s: float | None = None
    marked: bool = False

    @property
    def tokens(self) -> int:
        """Of its context, and what it may grow by."""
        return self.sequence.length + BUFFER


class ProgramPausing(HostTier):
    """Lets requests of active programs start, first come first served, and loses the contexts of paused programs first.

    The capacity is checked in every plan, not every five seconds. The tokens of programs that wait for a tool halve with every
    second where others are to be resumed: the published scheduler has this as an option.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.programs: dict[str, Program] = {}
        self._checked_s = -1.0

    def pause(self, sequence: Sequence, now: float) -> None:
        super().pause(sequence, now)
        program = self._program(sequence)
        if sequence.state is State.INTERCEPTED:
            program.phase = Phase.ACTS
            if program.marked:
                program.paused_s, program.marked = sequence.paused_s, False

    def wait(self, sequence: Sequence) -> None:
        super().wait(sequence)
        self._program(sequence).phase = Phase.REASONS

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        program = self._program(sequence)
        if sequence.state is State.RUNNING and program.paused_s is not None:
            program.paused_s = None  # nothing else ran

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        super().moves(budget, now, mover)
        self._check(now)

    def admits(self, sequence: Sequence, now: float) -> bool:
        self.plan(now)
        earlier = self.programs.get(sequence.session)
        program = self._program(sequence)
        if earlier is None and self._left() < 0:  # it begins where there is no room for it
            program.paused_s = now
        if now > self._checked_s:
            self._check(now)
        return program.paused_s is None

    def rank(self, sequence: Sequence, now: float) -> Rank:
        program = self._program(sequence)
        return (float(program.paused_s is None), sequence.paused_s)

    def _program(self, sequence: Sequence) -> Program:
        """The program of a sequence; one that has not been seen begins."""
        program = self.programs.setdefault(sequence.session, Program(sequence, Phase.BEGINS))
        program.sequence = sequence
        return program

    def _check(self, now: float) -> None:
        """Resume programs as far as there is room, and pause some if there is too little."""
        self._checked_s = now
        for name in [name for name, program in self.programs.items() if program.sequence.state is State.FINISHED]:
            del self.programs[name]
        for program in self._paused():
            needed = min(program.tokens, self.pools.total * self.inputs.page_size)
            waited = program.phase is not Phase.ACTS and now - (program.paused_s or now) > LONGEST_S
            if needed <= self._left_decayed(now) or waited:
                program.paused_s = None
        for program in self._may_pause():
            if self._left() >= 0:
                return
            if program.phase is Phase.ACTS:
                program.paused_s = now
            else:
                program.marked = True

    def _is_active(self, program: Program) -> bool:
        return program.paused_s is None and not program.marked

    def _left(self) -> int:
        """Tokens of the device beside the active programs that are not marked. Endless before the first plan."""
        active = [program.tokens for program in self.programs.values() if self._is_active(program)]
        total = self.pools.total * self.inputs.page_size
        return total - sum(active) if total else 1 << 60

    def _left_decayed(self, now: float) -> float:
        """The same, but the tokens of those that wait for a tool count half as much with every second."""
        waiting = [
            program for program in self.programs.values() if self._is_active(program) and program.phase is Phase.ACTS
        ]
        saved = [program.tokens * (1.0 - 0.5 ** (now - program.sequence.paused_s)) for program in waiting]
        return self._left() + sum(saved)

    def _paused(self) -> list[Program]:
        paused = [program for program in self.programs.values() if program.paused_s is not None]
        return sorted(paused, key=lambda program: (program.phase, program.tokens))

    def _may_pause(self) -> Iterator[Program]:
        active = [program for program in self.programs.values() if self._is_active(program)]
        yield from sorted(active, key=lambda program: (program.phase is not Phase.ACTS, program.tokens))
