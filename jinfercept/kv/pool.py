"""Slots of one memory, numbered and handed out lowest-used first. Knows neither pages nor what a slot holds."""

from collections.abc import Iterable


class SlotPool:
    """Slots `first … first + size - 1`.

    Args:
        size: number of slots; may be 0.
        first: number of the first slot (1 on the device, where slot 0 is scratch).
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first
        self._free = list(range(first + size - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot. There must be one."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)

    def check(self, used: Iterable[int]) -> None:
        """Every slot is either free or used, once. Raises AssertionError otherwise."""
        slots = sorted([*self._free, *used])
        assert slots == list(range(self.first, self.first + self.size)), "a slot is lost or owned twice"
