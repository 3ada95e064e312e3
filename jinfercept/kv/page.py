"""The KV unit: a run of `page_size` tokens over all layers, with up to two places, a device slot and a host slot."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Self, final, overload


class Residency(Enum):
    """Where a page's KV is."""

    DIRTY = "dirty"  # on the device only
    CLEAN = "clean"  # on the device, with an up-to-date copy on the host
    HOST = "host"  # on the host only
    MISSING = "missing"

    @property
    def on_device(self) -> bool:
        return self is Residency.DIRTY or self is Residency.CLEAN

    @property
    def on_host(self) -> bool:
        return self is Residency.HOST or self is Residency.CLEAN


class PageCopy(NamedTuple):
    """One page to copy between the memories, in either direction."""

    device_slot: int
    host_slot: int
    # On the way to the host, the page's context, as its number in the plan: its pages are likely to be fetched together.
    context: int = 0


@final
class SlotOccupancy(NamedTuple):
    """Device slots of windows or states, by kind."""

    free: int
    used: int  # of running contexts
    paused: int  # of paused contexts only
    cached: int  # of checkpoints only


class PageCopies(Sequence[PageCopy]):
    """A sequence of `PageCopy` in three columns, all in one direction. It grows only while its plan is made."""

    __slots__ = ("contexts", "device", "host")

    def __init__(self, copies: Iterable[PageCopy] = ()) -> None:
        self.device, self.host, self.contexts = array("i"), array("i"), array("i")
        for copy in copies:
            self.device.append(copy.device_slot)
            self.host.append(copy.host_slot)
            self.contexts.append(copy.context)

    @classmethod
    def of(cls, copies: Sequence[PageCopy]) -> Self:
        return copies if isinstance(copies, cls) else cls(copies)

    @classmethod
    def from_columns(cls, device: bytes, host: bytes, contexts: bytes) -> Self:
        copies = cls()
        for column, values in zip((copies.device, copies.host, copies.contexts), (device, host, contexts), strict=True):
            column.frombytes(values)
        return copies

    def add(self, device: "array[int]", host: "array[int]", context: int = 0) -> None:
        """Append copies of pages of one context, in the order of their slots."""
        self.device.extend(device)
        self.host.extend(host)
        self.contexts.extend(array("i", (context,)) * len(device))

    def __len__(self) -> int:
        return len(self.device)

    def __iter__(self) -> Iterator[PageCopy]:
        return map(PageCopy, self.device, self.host, self.contexts)

    @overload
    def __getitem__(self, index: int) -> PageCopy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PageCopy, ...]: ...
    def __getitem__(self, index: int | slice) -> PageCopy | tuple[PageCopy, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return PageCopy(self.device[index], self.host[index], self.contexts[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Occupancy(NamedTuple):
    """Pages of both pools by kind. Those of the device add up to `total`."""

    free: int
    used: int  # of running contexts
    paused: int  # of paused contexts only
    cached: int  # of finished prefixes
    total: int
    host: int = 0  # slots that hold a copy
    host_total: int = 0


type Slots = array[int]
"""Numbers of slots: an `array("i")`."""


class SlotPool:
    """The free slots of one memory, by number. Slots that were never taken are only counted, so a large pool costs nothing.

    Args:
        first: number of the first slot (1 on the device, where slot 0 is scratch).
        notes_drops: note freed slots in `dropped`.
    """

    def __init__(self, size: int, first: int = 0, *, notes_drops: bool = False) -> None:
        self.size = size
        self._first, self._notes_drops = first, notes_drops
        self._untouched = first  # this slot and all above were never taken
        self._returned: Slots = array("i")
        self._late: Slots = array("i")
        self.dropped: Slots = array("i")  # freed since it was last taken; the runner still has their arrays

    @property
    def num_free(self) -> int:
        return self._first + self.size - self._untouched + len(self._returned)

    @property
    def num_late(self) -> int:
        """Slots that are free from the next plan on."""
        return len(self._late)

    def begin(self) -> None:
        """Start a plan: slots that were given back late are free."""
        if self._late:
            late, self._late = self._late, array("i")
            SlotPool.give(self, late)  # `SharedSlots` counted its owners when it was given back

    def take(self, most: int) -> Slots:
        """Take up to `most` free slots."""
        from_returned = max(0, len(self._returned) - most)
        slots = self._returned[from_returned:]
        del self._returned[from_returned:]
        rest = min(most - len(slots), self._first + self.size - self._untouched)
        if rest:
            slots.extend(range(self._untouched, self._untouched + rest))
            self._untouched += rest
        return slots

    def give(self, slots: Slots, *, late: bool = False) -> None:
        """Free slots; `late` ones, which the plan being built still fills or writes, are free from the next plan on."""
        if late:
            self._late.extend(slots)
            return
        self._returned.extend(slots)
        if self._notes_drops:
            self.dropped.extend(slots)

    def take_dropped(self) -> tuple[int, ...]:
        """Slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self.dropped)
        del self.dropped[:]
        return dropped

    def check(self, used: Iterable[int]) -> None:
        """Assert that every slot is free, used or given back late, once."""
        slots = sorted([*self._returned, *self._late, *used])
        assert slots == list(range(self._first, self._untouched)), "a slot is lost or owned twice"


def root_digest(*parts: object) -> bytes:
    """The name of a tree of extents: contexts share pages only under equal roots (model, dtype, page size, isolation salt)."""
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).digest()
