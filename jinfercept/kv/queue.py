"""Extents in the order of their last use, and how many pages they have."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, final

from jinfercept.kv.extent import Extent


class _Place(NamedTuple):
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
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._order: list[tuple[_Place, Extent]] = []
        self._places: dict[Extent, _Place] = {}

    def put(self, extent: Extent, is_member: bool) -> None:
        """Make an extent a member or not, as it is now."""
        before = self._places.get(extent)
        if before is None and not is_member:
            return
        now = _Place(extent.last_use, -extent.start, id(extent), extent.num_pages) if is_member else None
        if before == now:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before,))]
            self.num_pages -= before.num_pages
            del self._places[extent]
        if now is not None:
            insort(self._order, (now, extent))
            self._places[extent] = now
            self.num_pages += now.num_pages

    def first(self) -> Extent | None:
        """The first member."""
        return self._order[0][1] if self._order else None

    def __iter__(self) -> Iterator[Extent]:
        """The members in order, which must not change meanwhile."""
        return (extent for _, extent in self._order)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._places
