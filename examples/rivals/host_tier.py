"""What the rivals have in common: a host tier that is written through, and evictions in an order that each gives itself.

It is what engines run under them (SGLang's hierarchical cache, vLLM with an offloading connector): every page is copied to the
host as the link allows, and nothing leaves the device before its slot is needed. So a rival differs from `lru_host` by its rule
alone, and is never weaker for the lack of a tier that its authors did not have.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from jinfercept.kv.page import Occupancy, Residency
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

type Rank = tuple[float, ...]


class HostTier(Policy):
    """A written-through host tier; a subclass ranks the contexts that wait for calls, and those of least rank are lost first.

    Contexts that wait to run are lost after all of these, the one that is served last first.

    Args:
        inputs: prices of the machine, and the estimator of durations.

    Attributes:
        paused: sequences that wait for calls or to run, by id.
        pools: of the last plan.
        now: of the last plan.
        write_through: makes the host copies.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self.inputs = inputs
        self.paused: dict[str, Sequence] = {}
        self.pools = Occupancy(0, 0, 0, 0, 0)
        self.now = 0.0
        self.write_through = LeastRecentlyUsed(writes_through=True)
        self._returned: list[
            tuple[Sequence, float]
        ] = []  # since the last plan, with the seconds at which they had paused

    @abstractmethod
    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Of a context that waits for calls; the least is lost first."""
        ...

    def returned(self, sequence: Sequence, seconds: float) -> None:
        """The calls of a sequence have returned, so many seconds after it paused. Ignored unless overridden."""
        return

    def pause(self, sequence: Sequence, now: float) -> None:
        self.write_through.pause(sequence, now)
        self.paused.pop(sequence.id, None)
        self.paused[sequence.id] = sequence

    def wait(self, sequence: Sequence) -> None:
        self._returned.append((sequence, sequence.paused_s))

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)
        self.write_through.resume(sequence, now)

    def plan(self, now: float) -> None:
        """A plan begins, or goes on: note what has returned since the last one."""
        self.now, returned, self._returned = now, self._returned, []
        for sequence, paused_s in returned:
            self.returned(sequence, now - paused_s)

    def admits(self, sequence: Sequence, now: float) -> bool:
        self.plan(now)
        return True

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Write through: paused contexts in the order of pausing, then the pages of running ones as they fill."""
        self.plan(now)
        self.pools = budget.pools
        self.write_through.moves(budget, now, mover)

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in self.lost_first(self.paused.values(), now):
            if device_pages(sequence):
                yield Move(sequence, sequence.context.tail_first, Action.SWAP, "a slot is needed")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Copies of contexts that are lost before the sequence's own."""
        for other in self.lost_first(self.paused.values(), now):
            if other is sequence or other.state is not State.INTERCEPTED:
                return
            yield Move(other, other.context.tail_first, Action.UNCOPY, "the host is full")

    def make_room(self, sequence: Sequence, others: Iterable[Sequence], mover: Mover) -> None:
        """Drop pages of others that the host has too, in this order, as far as bringing back the sequence lacks slots."""
        lacking = host_tokens(sequence) // self.inputs.page_size + 1 - self.pools.free - self.pools.cached
        for other in others:
            for run in other.context.runs() if lacking > 0 else ():
                if run.evictable and run.residency is Residency.CLEAN:
                    pages = run.pages[: max(0, lacking)]
                    mover.drop(other, "room for one that returns", pages)
                    lacking -= len(pages)

    def lost_first(self, sequences: Iterable[Sequence], now: float) -> list[Sequence]:
        """Paused sequences in the order in which they are lost."""
        return sorted(sequences, key=lambda sequence: self._place(sequence, now))

    def _place(self, sequence: Sequence, now: float) -> Rank:
        if sequence.state is State.INTERCEPTED:
            return (0.0, *self.rank(sequence, now))
        return (1.0, *(-value for value in sequence.rank), -sequence.order)


def device_pages(sequence: Sequence) -> int:
    """Pages of a context on the device."""
    return sum([run.num_pages for run in sequence.context.runs() if run.residency.on_device])


def host_tokens(sequence: Sequence) -> int:
    """Tokens of a context that are on the host only."""
    return sum([run.num_tokens for run in sequence.context.runs() if run.residency is Residency.HOST])
