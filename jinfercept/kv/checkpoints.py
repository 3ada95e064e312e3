"""Places in the tree of extents from which contexts with the same tokens can go on, with the windows or states before them."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import final

from jinfercept.kv.pool import SharedSlots, Slots


@final
class ContextCheckpoint:
    """A place from which contexts with the same tokens can go on.

    Attributes:
        first: index of the first page of the window before it, or of the page before the state.
        slots: of that window or state; none once the checkpoint is lost.
    """

    __slots__ = ("first", "slots")

    def __init__(self, first: int, slots: Slots) -> None:
        self.first, self.slots = first, slots


@final
class Checkpoints:
    """All checkpoints of a model in the order in which they are lost: those that no context is likely to use, then by last use.

    Args:
        slots: of all windows or states.
        found_later: a checkpoint is not found before the next plan, since the one being built writes its slots.
    """

    def __init__(self, slots: SharedSlots, *, found_later: bool) -> None:
        self._slots, self._found_later = slots, found_later
        self._order: OrderedDict[ContextCheckpoint, None] = OrderedDict()
        self._new: set[ContextCheckpoint] = set()

    def begin(self) -> None:
        """Start a plan: all checkpoints can be found."""
        self._new.clear()

    def add(
        self, checkpoints: dict[int, ContextCheckpoint], index: int, first: int, slots: Slots, *, likely: bool
    ) -> None:
        """Make a checkpoint, unless there is one.

        Args:
            checkpoints: of an extent, by the index behind the page before them.
            first: index of the window's first page.
            likely: contexts will go on from there; else it is the first to go.
        """
        checkpoint = checkpoints.get(index)
        if checkpoint is None or not checkpoint.slots:
            checkpoint = checkpoints[index] = ContextCheckpoint(first, self._slots.share(slots))
            self._order[checkpoint] = None
            if self._found_later:
                self._new.add(checkpoint)
            if not likely:
                self._order.move_to_end(checkpoint, last=False)
        if likely:
            self._order.move_to_end(checkpoint)

    def last(self, checkpoints: dict[int, ContextCheckpoint], end: int) -> int:
        """The last checkpoint up to an index that can be found; 0: there is none."""
        indexes = (index for index, at in checkpoints.items() if index <= end and at.slots and at not in self._new)
        return max(indexes, default=0)

    def use(self, checkpoint: ContextCheckpoint) -> tuple[int, Slots]:
        """Share a checkpoint's window or state: the index of its first page, and its slots."""
        self._order.move_to_end(checkpoint)
        return checkpoint.first, self._slots.share(checkpoint.slots[:])

    def lose_first(self) -> bool:
        """Lose the first checkpoint of which a slot has no other owner, or else the first; False if there is none to lose."""
        owners = self._slots.num_owners
        alone = (at for at in self._order if any(owners(slot) == 1 for slot in at.slots))
        checkpoint = next(alone, None) or next(iter(self._order), None)
        if checkpoint is not None:
            self.forget([checkpoint])
        return checkpoint is not None

    def forget(self, checkpoints: Iterable[ContextCheckpoint]) -> None:
        """Lose checkpoints."""
        for checkpoint in checkpoints:
            if checkpoint.slots:
                del self._order[checkpoint]
                self._slots.give(checkpoint.slots)
                checkpoint.slots = array("i")

    def clear(self) -> None:
        """Lose all checkpoints."""
        self.forget([*self._order])

    def __iter__(self) -> Iterator[ContextCheckpoint]:
        """All checkpoints in that order, which must not change meanwhile."""
        return iter(self._order)
