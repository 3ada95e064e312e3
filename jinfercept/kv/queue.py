"""Extents in the order of their last use, and how many pages they have."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, final

from jinfercept.kv.extent import PageExtent


class _ExtentPlace(NamedTuple):
    """Sorts extents by their last use, and those of one use from the last page on."""

    last_use: int
    minus_start: int
    identity: int
    num_pages: int


@final
class ExtentQueue:
    """A set of extents, least recently used first, of one use children before parents.

    Attributes:
        num_pages: of all members.
        places: of the members.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._order: list[tuple[_ExtentPlace, PageExtent]] = []
        self.places: dict[PageExtent, _ExtentPlace] = {}

    def put(self, extent: PageExtent) -> None:
        """Add an extent, or sort it in anew as it is now."""
        place = _ExtentPlace(extent.last_use, -extent.start, id(extent), extent.num_pages)
        if self.places.get(extent) != place:
            self.discard(extent)
            insort(self._order, (place, extent))
            self.places[extent] = place
            self.num_pages += place.num_pages

    def discard(self, extent: PageExtent) -> None:
        """Remove an extent if it is a member."""
        place = self.places.pop(extent, None)
        if place is not None:
            del self._order[bisect_left(self._order, (place,))]
            self.num_pages -= place.num_pages

    def first(self) -> PageExtent | None:
        """The first member."""
        return self._order[0][1] if self._order else None

    def __iter__(self) -> Iterator[PageExtent]:
        """The members in order, which must not change meanwhile."""
        return (extent for _, extent in self._order)
