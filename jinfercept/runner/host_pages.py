"""The host copies of pages or states: pinned arrays of several pages, and which host slot is which page of which array.

An array is freed when its last page is dropped. One of which at most half the pages are live is `sparse`: it is to be replaced
by a smaller one, so that the arrays have less than twice as many pages as there are live ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Array, Num

HostPages = Num[Array, "k l B *sides heads W"]
"""One part of the layers of several pages."""
KeptPages = Num[Array | np.ndarray, "k l B *sides heads W"] | tuple[Num[Array | np.ndarray, "_"], ...]
"""The same, or a sequence's states, an array for each dtype; NumPy has those that are in pageable memory."""


@dataclass(slots=True, eq=False)
class HostArray:
    """Several pages that cross the link together.

    Attributes:
        size: pages that it has room for, a power of two.
        slots: the host slots of its live pages, by their index in the array.
        parts: the pages' data, one array for each part of the layers.
    """

    size: int
    slots: dict[int, int]
    parts: list[KeptPages] = field(default_factory=list)

    @property
    def is_sparse(self) -> bool:
        """Whether an array of half the size could hold the live pages."""
        return 2 * len(self.slots) <= self.size


class HostPage(NamedTuple):
    """A page in an array."""

    array: HostArray
    position: int


@final
class HostSlots(dict[int, HostPage]):
    """The page of every host slot that holds one; written by `add`, `drop`, `compact` and `clear` alone."""

    @property
    def arrays(self) -> list[HostArray]:
        """Every array once."""
        return list({id(page.array): page.array for page in self.values()}.values())

    def add(self, slots: Sequence[int | None], size: int) -> HostArray:
        """An array of `size` pages for these slots, without data yet. The slots hold no page; None: a page is of no use."""
        array = HostArray(size, {index: slot for index, slot in enumerate(slots) if slot is not None})
        assert len(slots) <= size
        assert not self.keys() & set(array.slots.values())
        self.update({slot: HostPage(array, index) for index, slot in array.slots.items()})
        return array

    def drop(self, slots: Iterable[int]) -> list[HostArray]:
        """Forget these slots' pages; returns the arrays that have become sparse and still hold a page."""
        touched: dict[int, HostArray] = {}
        for slot in slots:
            array, index = self.pop(slot)
            del array.slots[index]
            touched[id(array)] = array
        return [array for array in touched.values() if array.slots and array.is_sparse]

    def compact(self, array: HostArray) -> tuple[HostArray, list[int]]:
        """Replace a sparse array by one of the smallest size; returns that one, without data, and its pages' old indices."""
        indices, slots = list(array.slots), list(array.slots.values())
        for slot in slots:
            del self[slot]
        return self.add(slots, 1 << (len(slots) - 1).bit_length()), indices
