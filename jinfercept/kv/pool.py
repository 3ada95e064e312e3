"""The free slots of one memory, by number."""

from collections.abc import Iterable


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
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self._first + self.size - self._untouched + len(self._returned)

    def take(self) -> int:
        """Take a free slot. There must be one."""
        if self._returned:
            return self._returned.pop()
        assert self.num_free
        self._untouched += 1
        return self._untouched - 1

    def give(self, slot: int) -> None:
        """Free a slot."""
        self._returned.append(slot)

    def check(self, used: Iterable[int]) -> None:
        """Every slot is either free or used, once. Raises AssertionError otherwise."""
        slots = sorted([*self._returned, *used])
        assert slots == list(range(self._first, self._untouched)), "a slot is lost or owned twice"
