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
