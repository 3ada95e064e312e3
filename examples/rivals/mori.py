"""MORI's tiers by relative idleness (Xia et al., arXiv 2606.00866): the busiest programs on the device, the idlest on the host.

A program's idleness is the share of its last cycles that it waited for tools. A program belongs to the device, to the host or
to neither, and stays there until a tier is over its capacity: then the idlest leaves. Requests of programs that are not on the
device wait until they are promoted, the busiest first.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from examples.rivals.host_tier import HostTier, Rank
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover
from jinfercept.sched.sequence import Sequence, State

CYCLES = 5
"""Cycles of reasoning and acting that idleness is of (k in the paper)."""
LONGEST_S = 1800.0
"""Seconds after which a program is promoted whatever the device holds, as in ThunderAgent, on which MORI is built."""


class Tier(IntEnum):
    """Where a program belongs, and the type of its pages: inactive, idle, busy."""

    WAITING = 0
    HOST = 1
    DEVICE = 2


@dataclass(slots=True)
class Program:
    """A session.

    Attributes:
        sequence: its last one.
        cycles: seconds of reasoning and of acting of its last turns; time in the queue is in neither.
        reasons_s: since when it runs; None: it does not.
        asks_s: since when it waits to run; None: it does not.
    """

    sequence: Sequence
    tier: Tier = Tier.WAITING
    cycles: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CYCLES))
    reasons_s: float | None = None
    reasoned_s: float = 0.0
    asks_s: float | None = None

    @property
    def tokens(self) -> int:
        return self.sequence.length

    @property
    def acts(self) -> bool:
        """Whether it waits for a tool, or for a person."""
        return self.sequence.state is State.INTERCEPTED

    def idleness(self, now: float) -> float:
        """Share of the time that it acted, the call in flight included; 0 for one that has just begun."""
        reasoned = [*(cycle[0] for cycle in self.cycles), self.reasoned_s]
        acted = [*(cycle[1] for cycle in self.cycles), now - self.sequence.paused_s if self.acts else 0.0]
        return sum(acted) / (sum(acted) + sum(reasoned) or 1.0)


class IdlenessTiers(HostTier):
    """Admits the requests of programs on the device, and loses first the pages of programs that are in neither tier.

    Capacities are checked in every plan, not every five seconds. The tokens of programs that act halve with every second where
    others are to be promoted, which is an option of the scheduler that MORI extends: without it requests wait for nothing.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.programs: dict[str, Program] = {}
        self._checked_s = -1.0

    def pause(self, sequence: Sequence, now: float) -> None:
        super().pause(sequence, now)
        program = self._program(sequence)
        if program.reasons_s is not None:
            program.reasoned_s += now - program.reasons_s
            program.reasons_s = None
        if sequence.state is not State.INTERCEPTED:
            program.asks_s = now

    def returned(self, sequence: Sequence, seconds: float) -> None:
        program = self._program(sequence)
        program.cycles.append((program.reasoned_s, seconds))
        program.reasoned_s, program.asks_s = 0.0, self.now

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        if sequence.state is State.RUNNING:
            program = self._program(sequence)
            program.tier, program.reasons_s, program.asks_s = Tier.DEVICE, now, None

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        super().moves(budget, now, mover)
        self._check(now)

    def admits(self, sequence: Sequence, now: float) -> bool:
        self.plan(now)
        program = self._program(sequence)
        if program.asks_s is None:
            program.asks_s = now
            self._checked_s = -1.0
        if now > self._checked_s:
            self._check(now)
        return program.tier is Tier.DEVICE

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (float(self._program(sequence).tier), sequence.paused_s)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """The types the other way round, since a busy program has its pages on the device: copies of busy ones first."""

        def host_rank(other: Sequence) -> Rank:
            return (-float(self._program(other).tier), other.paused_s)

        intercepted = [other for other in self.paused.values() if other.state is State.INTERCEPTED]
        for other in sorted(intercepted, key=host_rank):
            if other is not sequence and host_rank(other) < host_rank(sequence):
                yield Move(other, other.context.tail_first, Action.UNCOPY, "the host is full")

    def _program(self, sequence: Sequence) -> Program:
        """The program of a sequence; one that has not been seen begins."""
        program = self.programs.setdefault(sequence.session, Program(sequence))
        program.sequence = sequence
        return program

    def _check(self, now: float) -> None:
        """Demote the idlest programs of a device that is over its capacity; if it is not, promote those that wait to run."""
        self._checked_s = now
        if not self.pools.total:  # before the first plan
            return
        for name in [name for name, program in self.programs.items() if program.sequence.state is State.FINISHED]:
            del self.programs[name]
        acting = sorted(
            (program for program in self.programs.values() if program.tier is Tier.DEVICE and program.acts),
            key=lambda program: -program.idleness(now),
        )
        while self._left(Tier.DEVICE) < 0 and acting:
            self._demote(acting.pop(0), now)
        asking = [it for it in self.programs.values() if it.asks_s is not None and it.tier is not Tier.DEVICE]
        for program in sorted(asking, key=lambda it: (-it.tier, it.idleness(now), it.asks_s)):
            needed = min(program.tokens, self.pools.total * self.inputs.page_size)
            decayed = sum(other.tokens * (1.0 - 0.5 ** (now - other.sequence.paused_s)) for other in acting)
            if needed > self._left(Tier.DEVICE) + decayed and now - (program.asks_s or now) < LONGEST_S:
                continue
            while acting and needed > self._left(Tier.DEVICE):
                self._demote(acting.pop(0), now)
            program.tier = Tier.DEVICE

    def _demote(self, program: Program, now: float) -> None:
        """To the host, from which idler programs leave for it; to neither tier if there is no room."""
        program.tier = Tier.HOST
        on_host = [it for it in self.programs.values() if it.tier is Tier.HOST and it.asks_s is None]
        while self._left(Tier.HOST) < 0 and on_host:
            idlest = max(on_host, key=lambda it: it.idleness(now))
            on_host.remove(idlest)
            idlest.tier = Tier.WAITING

    def _left(self, tier: Tier) -> float:
        """Tokens of a tier's pool beside the programs that belong to it."""
        pages = {Tier.DEVICE: self.pools.total, Tier.HOST: self.pools.host_total}.get(tier)
        used = sum(program.tokens for program in self.programs.values() if program.tier is tier)
        return inf if pages is None else pages * self.inputs.page_size - used
