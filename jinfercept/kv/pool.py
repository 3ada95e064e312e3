"""The free slots of one memory, by number."""

from array import array
from collections.abc import Iterable

Slots = array[int]
"""Numbers of slots: an `array("i")`."""


class SlotPool:
    """Slots `first … first + size - 1`. Slots that were never taken are only counted, so that a large pool costs nothing.

    Args:
        size: number of slots; may be 0.
        first: number of the first slot (1 on the device, where slot 0 is scratch).
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self._first = first
        self._untouched = first  # this slot and all above were never taken
        self._returned: Slots = array("i")

    @property
    def num_free(self) -> int:
        return self._first + self.size - self._untouched + len(self._returned)

    def take(self, most: int) -> Slots:
        """Take up to so many free slots."""
        from_returned = max(0, len(self._returned) - most)
        slots = self._returned[from_returned:]
        del self._returned[from_returned:]
        rest = min(most - len(slots), self._first + self.size - self._untouched)
        if rest:
            slots.extend(range(self._untouched, self._untouched + rest))
            self._untouched += rest
        return slots

    def give(self, slots: Slots) -> None:
        """Free slots."""
        self._returned.extend(slots)

    def check(self, used: Iterable[int]) -> None:
        """Every slot is either free or used, once. Raises AssertionError otherwise."""
        slots = sorted([*self._returned, *used])
        assert slots == list(range(self._first, self._untouched)), "a slot is lost or owned twice"


class SharedSlots:
    """Device slots that several owners may have, by counting references.

    Args:
        size: number of slots, numbered from 1 (0 is scratch).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = SlotPool(size, first=1)
        self._refs = array("i", bytes(4 * (size + 1)))
        self._late: Slots = array("i")

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def begin(self) -> None:
        """Start a plan: what was given back late is free."""
        self._pool.give(self._late)
        self._late = array("i")

    def take(self, most: int) -> Slots:
        """Take up to so many free slots."""
        return self.share(self._pool.take(most))

    def share(self, slots: Slots) -> Slots:
        """Let one more owner have slots; returns them."""
        for slot in slots:
            self._refs[slot] += 1
        return slots

    def num_owners(self, slot: int) -> int:
        """Owners of a slot."""
        return self._refs[slot]

    def give(self, slots: Slots, *, late: bool = False) -> None:
        """Give slots back that one owner has.

        Args:
            late: the plan being built still writes them: they are free from the next plan on.
        """
        refs, free = self._refs, array("i")
        for slot in slots:
            refs[slot] -= 1
            if not refs[slot]:
                free.append(slot)
        if late:
            self._late.extend(free)
        else:
            self._pool.give(free)

    def check(self, owned: Iterable[Slots]) -> None:
        """Assert that every slot has as many references as owners, and is free or late without any."""
        refs = array("i", bytes(4 * len(self._refs)))
        for slots in owned:
            for slot in slots:
                refs[slot] += 1
        assert refs == self._refs, "a slot's references are not its owners"
        self._pool.check([*(slot for slot, count in enumerate(refs) if count), *self._late])
