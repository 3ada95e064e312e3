"""The `Policy` protocol, the policies that decide once, when a request pauses, and the `Observer` of what is done.

A request is paused while it is intercepted, and while it waits with pages of its own, after its calls or after a preemption.
The scheduler calls a policy when a request pauses and when it runs again, lets it move pages in every plan, and asks it for
victims when a device or host slot is needed and none is free. A policy moves pages only through a `Mover`.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol, final

from jinfercept.kv.context import PageRun
from jinfercept.kv.page import Occupancy
from jinfercept.sched.sequence import Sequence, State


class Action(Enum):
    COPY = "copy"
    DROP = "drop from the device"
    SWAP = "copy, then drop from the device"
    OFFLOAD = "copy, then drop from the device what has a copy"
    LOSE = "drop from both places"
    UNCOPY = "drop from the host"
    FETCH = "bring to the device"


class Move(NamedTuple):
    """An action for pages of a paused request, with the reason in a few words.

    Attributes:
        pages: consecutive indexes of the context's pages, in the order in which they move. Tail first is
            `context.tail_first`, head first `range(0, context.num_pages)`.
    """

    sequence: Sequence
    pages: range
    action: Action
    why: str


class Budget(NamedTuple):
    """What one iteration has left for paused contexts, and the sizes of its running sequences; all in tokens.

    Attributes:
        query_tokens: that the largest bucket can still take.
        link_tokens: of KV that the host link can still move while the iteration computes.
        running_context: tokens in the contexts of the running sequences.
        running_queries: query tokens of these sequences in this iteration.
        pools: pages of both pools by kind, as the plan has them so far.
    """

    query_tokens: int
    link_tokens: int
    running_context: int = 0
    running_queries: int = 0
    pools: Occupancy = Occupancy(0, 0, 0, 0, 0)


class Mover(Protocol):
    """Moves pages of contexts within the plan that is being made, and answers whether all of them could be moved.

    Every method takes a sequence, a reason in a few words, and the indexes of the pages to move, in this order; None: all
    pages of the sequence, first token first. A page stays where it is if it is in use or in flight, or if another context
    needs it.
    """

    @abstractmethod
    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        """Move pages at once; True if all of them are where the action brings them."""
        ...

    def copy(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        """Copy the pages that have no host copy, up to the first that is refused.

        False: the link or the host is full, or a page may not be copied yet.
        """
        return self.move(sequence, Action.COPY, why, pages)

    def drop(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        """Drop pages from the device, whether they have a host copy or not."""
        return self.move(sequence, Action.DROP, why, pages)

    def swap(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        """Copy pages to the host, as far as the link and the host have room, and drop them from the device."""
        return self.move(sequence, Action.SWAP, why, pages)

    def lose(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        return self.move(sequence, Action.LOSE, why, pages)

    def uncopy(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        return self.move(sequence, Action.UNCOPY, why, pages)

    def fetch(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        """Bring pages that are only on the host to free device slots, ahead of the sequence's return.

        False: the link or the device is full, or a page is still on its way out.
        """
        return self.move(sequence, Action.FETCH, why, pages)


class Policy(Protocol):
    """The choice between keeping, copying and dropping. Inherit from it, or write a class with all of its members.

    A policy can rely on this: calls come from one thread, in the order of events; `now` never falls; a page of a paused
    sequence changes its place only by a move, or when its slot is taken at last because no victim was offered. A policy reads
    sequences and pages and writes to neither, keeps no page beyond a call, and blocks on nothing. Its attributes are
    constants.

    Attributes:
        requeues_at_tail: a request whose calls have returned is queued last.
        protects_paused: intercepted contexts lose pages only by `moves` while a sequence runs.
        synchronous: transfers have no budget, and the step waits for them.
    """

    requeues_at_tail: bool = False
    protects_paused: bool = False
    synchronous: bool = False

    @abstractmethod
    def pause(self, sequence: Sequence, now: float) -> None:
        """The sequence was intercepted or preempted: the references on its pages are evictable from now on.

        It may be paused already: a preempted sequence that is intercepted while it waits is paused twice.
        """
        ...

    def wait(self, sequence: Sequence) -> None:
        """The calls of a paused sequence have returned. It waits, and will run as soon as it can. Ignored unless overridden."""
        return

    @abstractmethod
    def resume(self, sequence: Sequence, now: float) -> None:
        """The sequence runs or is finished: its pages must not be moved. It may never have been paused."""
        ...

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Move pages within this plan, most urgent first. Copies beyond the budget are refused. Nothing unless overridden."""
        return

    @abstractmethod
    def victims(self, now: float) -> Iterator[Move]:
        """Evictions from the device (`DROP`, `SWAP`, `OFFLOAD` or `LOSE`), in order, while a slot is needed.

        Must offer every page of every paused sequence in the end, and none twice. Pages that contexts share may be left out:
        the scheduler takes their slots last. The iterator is read as far as slots are needed, perhaps at several times while
        one plan is made. Of the last move, only the pages are taken whose slots are needed.
        """
        ...

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Evictions from the host (`UNCOPY` or `LOSE`), in order, while a copy of one of the sequence's pages needs a slot.

        A page that is also on the device stays there under `UNCOPY`, and is dirty again. None unless overridden: copies are
        refused while the host is full.
        """
        return iter(())

    def admits(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting sequence may start; later ones pass one that may not. True unless overridden.

        If nothing runs and all are turned away, the first starts after `scheduler.MOST_TURNED_AWAY_S`. Not called while
        tenants compete, which are served by their shares.
        """
        return True


def longest_paused(paused: Iterable[Sequence], sequence: Sequence) -> Iterator[Move]:
    """Host copies of intercepted contexts other than the sequence's, longest paused first, tail first."""
    intercepted = [other for other in paused if other.state is State.INTERCEPTED and other is not sequence]
    for other in sorted(intercepted, key=lambda other: other.paused_s):
        for run in reversed(other.context.runs()):
            if run.residency.on_host:
                yield Move(other, run.pages[::-1], Action.UNCOPY, "the host is full")


@final
class AtPause(Policy):
    """Applies one action, `SWAP` or `LOSE`, to all pages of a request when it pauses, or when their slots are needed."""

    def __init__(
        self,
        action: Action,
        *,
        requeues_at_tail: bool = False,
        protects_paused: bool = False,
        synchronous: bool = False,
    ) -> None:
        self.requeues_at_tail = requeues_at_tail
        self.protects_paused = protects_paused
        self.synchronous = synchronous
        self._action = action
        self._paused: dict[str, Sequence] = {}
        self._fresh: dict[str, Sequence] = {}  # paused since the last plan

    def pause(self, sequence: Sequence, now: float) -> None:
        self._paused[sequence.id] = sequence
        # a protected context stays where it is when it pauses
        if self.protects_paused and sequence.state is State.INTERCEPTED:
            self._fresh.pop(sequence.id, None)
        else:
            self._fresh[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._paused.pop(sequence.id, None)
        self._fresh.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        fresh, self._fresh = self._fresh, {}
        for sequence in fresh.values():
            mover.move(sequence, self._action, "paused")

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in sorted(self._paused.values(), key=lambda sequence: -sequence.order):
            yield Move(sequence, sequence.context.tail_first, self._action, "a slot is needed")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return longest_paused(self._paused.values(), sequence)


def discard() -> Policy:
    """Drop every paused context at once and requeue it at the tail, as vLLM did when InferCept was written."""
    return AtPause(Action.LOSE, requeues_at_tail=True)


def improved_discard() -> Policy:
    """Drop every paused context at once, but keep the request's place by original arrival (InferCept §3.2)."""
    return AtPause(Action.LOSE)


def preserve() -> Policy:
    """Keep every intercepted context on the device; evict one only when no other sequence can run (InferCept §3.2)."""
    return AtPause(Action.LOSE, protects_paused=True)


def swap() -> Policy:
    """Move every paused context to the host at once, and back when it runs again; steps wait for it (InferCept §3.2)."""
    return AtPause(Action.SWAP, synchronous=True)


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
