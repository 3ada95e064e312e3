"""Extents: runs of consecutive pages that are alike, in a tree by their tokens.

A path from the root names a context's full pages, so contexts with a common beginning have the same extents. Cutting an extent
makes a new parent with the first pages: contexts and children that point at the old extent, now the rest, stay right.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from jinfercept.kv.page import Residency, SlotPool, Slots

if TYPE_CHECKING:
    from jinfercept.kv.context import Context

TOKEN_BYTES = 4
NEVER = 1 << 60
"""A page that no plan fills."""


ExtentMarks = tuple[Residency, bool, bool, bool]
"""What the pages of an extent have in common: `residency`, `shared`, `evictable` and `in_flight` of a `kv.context.PageRun`."""


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as bytes that compare and hash as the ids do."""
    return (tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)).tobytes()


def common_pages(tokens: bytes | bytearray, other_bytes: bytes, offset: int, page_bytes: int) -> int:
    """Number of leading pages that tokens have in common with others, which begin at byte `offset`."""
    alike, differ = 0, min(len(tokens), len(other_bytes) - offset) // page_bytes + 1
    end = differ - 1
    with memoryview(tokens) as view:
        if other_bytes.startswith(view[: end * page_bytes], offset):
            return end
        while differ - alike > 1:
            middle = (alike + differ) // 2
            part = view[alike * page_bytes : middle * page_bytes]
            if other_bytes.startswith(part, offset + alike * page_bytes):
                alike = middle
            else:
                differ = middle
            part.release()
    return alike


class ContextCheckpoint:
    """A place from which contexts with the same tokens can go on that have more than pages (`SidePool`)."""

    __slots__ = ("first", "host_slots", "offloading", "slots")

    def __init__(self, first: int) -> None:
        # `first` is the index of the first page of the window before the place, or of the page before the state. The slots are
        # those of this window or state on the device, and of its copy on the host. A checkpoint without either is lost.
        self.first, self.slots, self.host_slots, self.offloading = first, array("i"), array("i"), False


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class PageExtent:
    """Consecutive pages with the same residency and the same contexts; mutable, written by the `ExtentStore` and the manager.

    An extent in the tree has full pages of accepted tokens. One without tokens is the root of a tree, or the private tail of a
    context: its last pages, which no other context has.
    """

    parent: "PageExtent | None" = None  # None for a root, a tail, and an extent that is gone
    start: int = 0  # index of the first page in a context
    _: KW_ONLY
    shareable: bool = True  # new contexts find the extent; false under a root that was forgotten
    number: int = field(init=False, default_factory=count().__next__)  # in the order in which extents are made
    children: "dict[bytes, PageExtent]" = field(default_factory=dict)  # by the tokens of their first page
    num_pages: int = 0
    # Of the pages; of a tail, those of its leading pages that are full, computed and accepted.
    tokens: bytearray = field(default_factory=bytearray)
    device: Slots | None = None  # of all pages, or none
    host: Slots | None = None  # likewise
    filled: int = 0  # leading tokens whose KV is valid on the device
    host_filled: int = 0  # likewise, on the host
    refs: int = 0  # contexts of running sequences that have the pages; they may not be evicted
    evictable_refs: int = 0  # contexts of waiting and intercepted sequences that have them; they may be evicted
    fetching: bool = False  # by the plan being built; readable from the next plan on
    offloading: bool = False  # by the plan being built; can be fetched from the next plan on
    fresh: int = NEVER  # first page that the plan being built fills; it can be offloaded from the next plan on
    last_use: int = 0  # grows from use to use
    contexts: "set[Context]" = field(default_factory=set)  # they keep their runs until the extent changes (`changed`)
    marks: ExtentMarks | None = None  # the result of `mark`, until the extent changes
    checkpoints: dict[int, ContextCheckpoint] = field(default_factory=dict)  # by the index behind a page

    @property
    def end(self) -> int:
        return self.start + self.num_pages

    @property
    def residency(self) -> Residency:
        if self.device is None:
            return Residency.MISSING if self.host is None else Residency.HOST
        return Residency.DIRTY if self.host is None else Residency.CLEAN

    @property
    def num_contexts(self) -> int:
        return self.refs + self.evictable_refs

    @property
    def in_flight(self) -> bool:
        """Whether the plan being built fetches, copies or fills pages."""
        return self.fetching or self.offloading or self.fresh != NEVER

    @property
    def is_evictable(self) -> bool:
        """Whether the device slots can be freed now."""
        return self.device is not None and not self.refs and not self.fetching

    @property
    def is_fetchable(self) -> bool:
        """Whether the pages can be fetched from the host now."""
        return self.device is None and self.host is not None and not self.offloading

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV the pages hold, on the device if they are there, else on the host."""
        return self.host_filled if self.device is None else self.filled

    def mark(self) -> ExtentMarks:
        """Find and store what all pages have in common."""
        is_in_flight = self.fetching or self.offloading
        self.marks = marks = (self.residency, self.num_contexts > 1, self.is_evictable, is_in_flight)
        return marks

    def changed(self) -> None:
        """Let the contexts that have the pages find their runs anew."""
        self.marks = None
        for context in self.contexts:
            context.forget_runs()

    def reshaped(self) -> None:
        """Let the contexts that have the pages find their extents anew."""
        for context in self.contexts:
            context.forget_extents()

    def add_child(self, child: "PageExtent", page_bytes: int) -> None:
        """Put an extent behind this one."""
        child.parent = self
        self.children[bytes(child.tokens[:page_bytes])] = child

    def matches(self, tokens: bytes, page_bytes: int) -> "Iterator[tuple[PageExtent, int]]":
        """The extents that continue this one with these tokens, one behind the other, each with how many of its pages match."""
        extent, offset = self, 0
        while (child := extent.children.get(tokens[offset : offset + page_bytes])) is not None:
            num_pages = common_pages(child.tokens, tokens, offset, page_bytes)
            yield child, num_pages
            if num_pages < child.num_pages:
                return
            extent, offset = child, offset + num_pages * page_bytes

    def key(self, page_bytes: int) -> bytes:
        return bytes(self.tokens[:page_bytes])

    def split(self, num_pages: int, page_size: int) -> "PageExtent":
        """Move the first pages to a new extent without contexts, which is returned."""
        head, size = PageExtent(start=self.start, shareable=self.shareable), num_pages * page_size
        head.num_pages, head.fresh = num_pages, self.fresh if self.fresh < self.start + num_pages else NEVER
        head.tokens, self.tokens = _cut_bytes(self.tokens, size * TOKEN_BYTES)
        if self.device is not None:
            head.device, self.device = _cut_slots(self.device, num_pages)
            head.filled = min(self.filled, size)
            self.filled -= head.filled
        if self.host is not None:
            head.host, self.host = _cut_slots(self.host, num_pages)
            head.host_filled = size
            self.host_filled -= size
        self.start += num_pages
        self.num_pages -= num_pages
        return head

    def cut(self, num_pages: int, page_size: int) -> "PageExtent":
        """Move the first pages to a new parent, which is returned."""
        assert 0 < num_pages < self.num_pages
        before, page_bytes = self.parent, page_size * TOKEN_BYTES
        assert before is not None
        head = self.split(num_pages, page_size)
        head.refs, head.evictable_refs, head.last_use = self.refs, self.evictable_refs, self.last_use
        head.contexts = self.contexts.copy()
        head.fetching, head.offloading = self.fetching, self.offloading
        head.checkpoints, self.checkpoints = _cut_checkpoints(self.checkpoints, self.start)
        before.add_child(head, page_bytes)
        head.add_child(self, page_bytes)
        self.reshaped()
        return head

    def joinable(self, page_size: int) -> "PageExtent | None":
        """The only child, if its pages are alike in everything with this extent's."""
        if len(self.children) != 1 or not self.num_pages or self.in_flight:
            return None
        child = next(iter(self.children.values()))
        alike = (
            self.refs == child.refs
            and self.evictable_refs == child.evictable_refs
            and (self.device is None) == (child.device is None)
            and (self.host is None) == (child.host is None)
            and not child.in_flight
            and (self.device is None or self.filled == self.num_pages * page_size)
            and (self.refs + self.evictable_refs > 0 or self.last_use == child.last_use)
        )
        return child if alike else None

    def join(self, child: "PageExtent", page_bytes: int) -> None:
        """Move all pages to the only child, which is alike. This extent is gone afterwards."""
        before = self.parent
        assert before is not None
        self.tokens += child.tokens
        if self.device is not None and child.device is not None:
            self.device.extend(child.device)
        if self.host is not None and child.host is not None:
            self.host.extend(child.host)
        child.tokens, child.device, child.host = self.tokens, self.device, self.host
        child.filled += self.filled
        child.host_filled += self.host_filled
        child.start = self.start
        child.num_pages += self.num_pages
        child.last_use = max(child.last_use, self.last_use)
        child.checkpoints |= self.checkpoints
        before.add_child(child, page_bytes)
        self.parent, self.num_pages, self.children = None, 0, {}
        self.tokens, self.device, self.host = bytearray(), None, None
        self.contexts = set()
        child.reshaped()

    def hand_over(self, child: "PageExtent", num_kept: int, page_size: int, pool: SlotPool) -> None:
        """Move all but the first pages to the only child, which is not on the device, and free their device slots."""
        assert self.device is not None
        num_pages, size = self.num_pages - num_kept, num_kept * page_size
        pool.give(self.device[num_kept:])
        del self.device[num_kept:]
        self.filled = size
        if self.host is not None and child.host is not None:
            child.host[:0] = self.host[num_kept:]
            del self.host[num_kept:]
            child.host_filled += self.host_filled - size
            self.host_filled = size
        child.tokens[:0] = self.tokens[size * TOKEN_BYTES :]
        del self.tokens[size * TOKEN_BYTES :]
        self.num_pages = num_kept
        child.num_pages += num_pages
        child.start -= num_pages
        self.checkpoints, handed = _cut_checkpoints(self.checkpoints, child.start)
        child.checkpoints |= handed
        self.children = {child.key(page_size * TOKEN_BYTES): child}

    def check(self, page_size: int) -> None:
        """Assert that slots, counts and tokens agree, and that the parent has the extent as a child."""
        size, parent, residency = self.num_pages * page_size, self.parent, self.residency
        page_bytes = page_size * TOKEN_BYTES
        for slots in (self.device, self.host):
            assert slots is None or len(slots) == self.num_pages, f"slots and pages differ: {self}"
        assert residency is not Residency.CLEAN or self.filled == self.host_filled, f"stale copy: {self}"
        assert (self.device is None) <= (self.filled == 0), f"filled and not there: {self}"
        assert self.filled <= size
        if parent is None:  # a tail
            assert self.num_contexts == 1 or not self.num_pages
            return
        assert len(self.tokens) == self.num_pages * page_bytes > 0, f"tokens of {self}"
        assert parent.children[self.key(page_bytes)] is self, f"not a child of its parent: {self}"
        assert self.start == parent.end, f"not behind its parent: {self}"
        assert self.shareable == parent.shareable
        assert not parent.num_pages or (self.num_contexts <= parent.num_contexts), f"{parent} lacks contexts of {self}"
        assert self.num_contexts or self.children or residency is not Residency.MISSING, f"useless: {self}"
        assert self.host is None or self.host_filled == size, f"a short copy: {self}"
        assert self.refs or self.filled in (0, size), f"a page half filled that no sequence fills: {self}"

    def __repr__(self) -> str:
        return (
            f"PageExtent({self.start}+{self.num_pages} {self.residency.value} filled={self.filled},{self.host_filled} "
            f"refs={self.refs},{self.evictable_refs} fetching={self.fetching} offloading={self.offloading})"
        )


def _cut_bytes(tokens: bytearray, end: int) -> tuple[bytearray, bytearray]:
    # The larger part is not copied.
    if end < len(tokens) // 2:
        head = tokens[:end]
        del tokens[:end]
        return head, tokens
    rest = tokens[end:]
    del tokens[end:]
    return tokens, rest


def _cut_checkpoints(
    checkpoints: dict[int, ContextCheckpoint], end: int
) -> tuple[dict[int, ContextCheckpoint], dict[int, ContextCheckpoint]]:
    if not checkpoints:
        return {}, checkpoints
    return {index: checkpoints[index] for index in checkpoints if index <= end}, {
        index: checkpoints[index] for index in checkpoints if index > end
    }


def _cut_slots(slots: Slots, end: int) -> tuple[Slots, Slots]:
    rest = slots[end:]
    del slots[end:]
    return slots, rest
