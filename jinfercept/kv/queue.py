"""Extents that may be evicted, in the order of their last use, and how many pages they have."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, final

from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import Residency


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

    def sort(self, extent: PageExtent, is_member: bool) -> None:
        """Add an extent, sort it in anew as it is now, or remove it."""
        if not is_member:
            if extent in self.places:
                self.discard(extent)
            return
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


@final
class ExtentQueues:
    """The extents that may be evicted, by what is lost then.

    Attributes:
        paused: on the device, of paused contexts only.
        paused_clean: those of them that have a host copy.
        cached: on the device, of no context.
        reclaimable: with a host copy on which no paused context depends.
    """

    def __init__(self) -> None:
        self.paused, self.paused_clean = ExtentQueue(), ExtentQueue()
        self.cached, self.reclaimable = ExtentQueue(), ExtentQueue()

    def sort(self, extent: PageExtent) -> None:
        """Add an extent to the queues to which it belongs as it is now, and remove it from the others."""
        on_device = extent.device is not None and not extent.refs and extent.num_pages > 0
        is_paused = on_device and extent.evictable_refs > 0
        has_copy = extent.host is not None
        self.paused.sort(extent, is_paused)
        self.paused_clean.sort(extent, is_paused and has_copy)
        self.cached.sort(extent, on_device and not is_paused)
        self.reclaimable.sort(extent, has_copy and _is_reclaimable(extent))

    def discard(self, extent: PageExtent) -> None:
        """Remove an extent from every queue."""
        for queue in self._all():
            queue.discard(extent)

    def __iter__(self) -> Iterator[PageExtent]:
        """All members, which must not change meanwhile; some several times."""
        return chain.from_iterable(self._all())

    def check(self, extents: Iterable[PageExtent]) -> None:
        """Assert that the members among all extents of the store, and the counts of their pages, are right."""
        for extent in extents:
            paused = (
                extent.device is not None and not extent.refs and extent.evictable_refs > 0 and extent.num_pages > 0
            )
            cached = extent.device is not None and not extent.num_contexts
            assert (extent in self.paused.places) == paused, f"paused or not: {extent}"
            assert (extent in self.paused_clean.places) == (paused and extent.residency is Residency.CLEAN)
            assert (extent in self.cached.places) == cached, f"cached or not: {extent}"
            assert (extent in self.reclaimable.places) == _is_reclaimable(extent), f"reclaimable or not: {extent}"
        for queue in self._all():
            assert queue.num_pages == sum([extent.num_pages for extent in queue]), "pages of a queue"

    def _all(self) -> tuple[ExtentQueue, ...]:
        return self.paused, self.paused_clean, self.cached, self.reclaimable


def _is_reclaimable(extent: PageExtent) -> bool:
    if extent.host is None or extent.offloading:
        return False
    return extent.device is not None if extent.refs else not extent.evictable_refs
