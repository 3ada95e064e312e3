"""The KV of one request as a path of extents: what policies read of it, and how its pages enter the tree of extents."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, final

from jinfercept.kv.extent import NEVER, ContextCheckpoint, PageExtent, common_pages, token_bytes
from jinfercept.kv.page import Residency, Slots
from jinfercept.kv.store import ExtentStore

_START = attrgetter("start")


class ContextResidency(NamedTuple):
    """Tokens of a context by place, when its sequence starts to run."""

    device: int
    host: int  # only on the host, to be fetched
    missing: int  # at neither place, to be recomputed


class PageRun(NamedTuple):
    """Consecutive pages of a context that are alike."""

    start: int  # index of the first page in the context
    num_pages: int
    residency: Residency
    shared: bool  # other contexts have each page, too
    evictable: bool  # the device slots can be freed now: no running sequence has the pages, and none is on its way in
    in_flight: bool  # the plan being built copies each page, in either direction
    num_tokens: int  # whose KV the pages hold, on the device if they are there, else on the host

    @property
    def pages(self) -> range:
        return range(self.start, self.start + self.num_pages)


NOT_READ = 1 << 60
"""A position that no plan computes."""


class ContextSide:
    """What a context has beside its pages; mutable, written by the `SidePool` alone."""

    __slots__ = ("cuts", "fetching", "marked", "offloading")

    def __init__(self) -> None:
        # Indexes behind pages at which other contexts are likely to part from this one, ascending; see `SidePool.share`.
        self.cuts: list[int] = []
        self.marked: list[ContextCheckpoint] = []  # the checkpoints there that are made
        # By the plan being built: it is readable from the next plan on; all or a part of it is copied.
        self.fetching = self.offloading = False


@final
class ContextWindow(ContextSide):
    """The pages of one context in the layers with windows; mutable, written by the `WindowPool` alone."""

    __slots__ = ("first", "host_first", "host_slots", "read_from", "slots")

    def __init__(self) -> None:
        super().__init__()
        self.first = self.host_first = 0  # indexes of the first page that has a device slot, and a host slot
        self.slots: Slots = array("i")  # of that page and those behind it
        self.host_slots: Slots = array("i")  # likewise
        self.read_from = NOT_READ  # least position whose query the plan being built computes

    @property
    def end(self) -> int:
        return self.first + len(self.slots)

    @property
    def host_end(self) -> int:
        return self.host_first + len(self.host_slots)

    def add(self, slots: Slots) -> None:
        """Use device slots for the next pages, or for those that have only host copies."""
        if self.host_slots and not self.slots:
            self.first = self.host_first
        self.slots.extend(slots)

    def append(self, index: int) -> bool:
        """Whether the next token goes to the page `index`, which has a device slot and no copy."""
        return self.host_first + len(self.host_slots) <= index < self.first + len(self.slots)


@final
class ContextState(ContextSide):
    """The state of one context in the recurrent layers; mutable, written by the `StatePool` alone."""

    __slots__ = ("host", "last_page", "position", "slot", "source")

    def __init__(self) -> None:
        super().__init__()
        # slot: of the device, of this context alone, with its state, written by its next chunk; 0: there is none.
        # source: of the device, shared with others, from which its next chunk begins; 0: there is none.
        # position: leading tokens that the state and its copy have seen, behind the plan being built.
        self.slot = self.source = self.position = 0
        self.host = -1  # slot of the host copy; -1: there is none
        # Behind the last page that the context has filled one token at a time.
        self.last_page: ContextCheckpoint | None = None

    @property
    def slots(self) -> Slots:
        slot = self.source or self.slot
        return array("i", (slot,) if slot else ())

    @property
    def host_slots(self) -> Slots:
        return array("i", (self.host,) if self.host >= 0 else ())

    def add(self, slots: Slots) -> None:
        """Use a device slot, from the next chunk on or for a fetched state."""
        (self.slot,) = slots

    def append(self, index: int) -> bool:
        """Note that the plan being built computes the next token. False if that takes another slot or outdates a copy."""
        if not self.slot or self.source or self.host >= 0:
            return False
        self.position += 1  # its slot is not noted as written: a sequence that a plan computes is not preempted in it
        return True


class Context:
    """The pages of one sequence, first token first; mutable, changed by the `KVManager` alone.

    The pages are those of the extents from the root of a tree down to `last`, and behind them those of a private `tail`: the
    page that is not full yet, pages whose last token is not accepted yet, and pages that another context computed, too.
    """

    __slots__ = (
        "_extents",
        "_runs",
        "in_use",
        "last",
        "num_stored",
        "page_size",
        "ready",
        "root",
        "shared",
        "side",
        "side_cost",
        "store",
        "tail",
        "uncommitted",
    )

    def __init__(
        self,
        root: bytes,
        tree: PageExtent,
        store: ExtentStore,
    ) -> None:
        self.root = root  # the name of its tree
        self.store, self.page_size = store, store.page_size
        self.in_use = False  # the sequence runs, and the references pin the pages; else they are evictable
        self.shared = False  # pages of other contexts are or were among the pages
        self.ready = 0  # leading tokens whose KV is readable on the device now; valid only while in use
        self.uncommitted = 0  # least number of accepted tokens with which one more page may be full
        self.side: ContextWindow | ContextState | None = None  # None if the model has no such layers
        self.side_cost = 0.0  # memory of a side's slot, in tokens of KV
        self.num_stored = 0  # leading pages that a disk had when it was last asked; written by the disk tier
        self.begin(tree)

    def begin(self, last: PageExtent) -> None:
        """Let the pages be those down to this extent, with an empty tail behind them."""
        self.last = last
        self.tail = PageExtent(start=last.end)
        self.tail.refs, self.tail.evictable_refs = int(self.in_use), int(not self.in_use)
        self.tail.contexts.add(self)
        self.forget_extents()

    def forget_extents(self) -> None:
        self._extents: list[PageExtent] | None = None
        self.forget_runs()

    def forget_runs(self) -> None:
        # kept until one of the extents changes, as the extents are
        self._runs: list[PageRun] | None = None

    @property
    def num_pages(self) -> int:
        return self.tail.end

    @property
    def tail_first(self) -> range:
        """Indexes of all pages, last token first."""
        return range(self.tail.end - 1, -1, -1)

    @property
    def extents(self) -> list[PageExtent]:
        """The extents of the pages, first token first; not to be changed."""
        extents = self._extents
        if extents is None:
            extents = [self.tail] if self.tail.num_pages else []
            extent = self.last
            while extent.parent is not None:
                extents.append(extent)
                extent = extent.parent
            extents.reverse()
            self._extents = extents
        return extents

    def extents_from(self, index: int) -> list[PageExtent]:
        """The extents of the page `index` and of those behind it, first token first."""
        extents = self.extents
        first = bisect_right(extents, index, key=_START)
        if first and extents[first - 1].end > index:
            first -= 1
        return extents[first:]

    def parts(self, first: int, last: int) -> list[tuple[PageExtent, int, int]]:
        """The extents of the pages `first … last - 1`. Each comes with the first of these pages that it has, and the one
        behind."""
        parts = list[tuple[PageExtent, int, int]]()
        for extent in self.extents_from(first):
            start = extent.start
            if start >= last:
                break
            end = start + extent.num_pages
            parts.append((extent, start if start > first else first, end if end < last else last))
        return parts

    def runs(self, pages: range | None = None) -> list[PageRun]:
        """The pages as runs of pages that are alike; not to be changed.

        Args:
            pages: consecutive indexes, ascending or descending, whose order the runs have; None: all, first token first.
        """
        if pages is not None:
            runs = self._alike(*bounds(pages))
            return runs if pages.step > 0 else runs[::-1]
        runs = self._runs
        if runs is None:
            runs = self._runs = self._alike(0, self.num_pages)
        return runs

    def _alike(self, first: int, last: int) -> list[PageRun]:
        runs, alike, size = list[PageRun](), None, self.page_size
        start = num_pages = num_tokens = 0
        for extent in self.extents_from(first) if first else self.extents:
            begin, pages, filled = extent.start, extent.num_pages, extent.num_tokens
            if begin >= last:
                break
            if begin < first:
                pages, filled, begin = begin + pages - first, max(0, filled - (first - begin) * size), first
            if begin + pages > last:
                pages = last - begin
                filled = min(filled, pages * size)
            marks = extent.marks or extent.mark()
            if marks != alike:
                if alike is not None:
                    runs.append(PageRun(start, num_pages, *alike, num_tokens))
                alike, start, num_pages, num_tokens = marks, begin, 0, 0
            num_pages += pages
            num_tokens += filled
        if alike is not None:
            runs.append(PageRun(start, num_pages, *alike, num_tokens))
        return runs

    def residency(self, num_tokens: int) -> ContextResidency:
        """The tokens by place. `num_tokens` is the number of leading tokens that were ever computed."""
        device = host = 0
        for extent in self.extents:
            if extent.device is not None:
                device += extent.filled
            else:
                host += extent.host_filled
        return ContextResidency(device, host, max(0, num_tokens - device - host))

    def lacks(self, num_tokens: int) -> tuple[list[tuple[int, int]], int]:
        """The gaps in the first `num_tokens` tokens, as first token and end; and how many tokens only the host has."""
        gaps, host_tokens, size, end = list[tuple[int, int]](), 0, self.page_size, 0
        for extent in self.extents:
            end = min(num_tokens, extent.end * size)
            if extent.device is None:
                if extent.host is None:
                    gaps.append((extent.start * size, end))
                else:
                    host_tokens += extent.host_filled
        if end < num_tokens:
            gaps.append((end, num_tokens))
        return gaps, host_tokens

    @property
    def is_lost(self) -> bool:
        return all(extent.residency is Residency.MISSING for extent in self.extents)

    @property
    def own_tokens(self) -> int:
        """Number of tokens on the device that no other context refers to: C of the waste equations."""
        return sum([extent.filled for extent in self.extents if extent.num_contexts == 1])

    @property
    def state_tokens(self) -> int:
        """Memory of its window or state, in tokens of KV."""
        return 0 if self.side is None else round(len(self.side.slots) * self.side_cost)

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is on the device or on the host."""
        return sum([extent.num_tokens for extent in self.extents])

    @property
    def is_whole(self) -> bool:
        return all(extent.residency is not Residency.MISSING for extent in self.extents)

    def slots(self, start: int, end: int) -> Slots:
        """The device slots of the pages `start … end - 1`, all of which have one."""
        slots: Slots = array("i")
        for extent, first, last in self.parts(start, end):
            assert extent.device is not None
            slots.extend(extent.device[first - extent.start : last - extent.start])
        assert len(slots) == max(0, end - start)
        return slots

    # -- its pages and the tree: for the manager --------------------------------------------------------------------

    def enter(self, extent: PageExtent) -> None:
        """Add the pages of an extent behind the last one."""
        extent.contexts.add(self)
        self.store.count(extent, int(self.in_use), int(not self.in_use))
        self.last = extent
        self.forget_extents()

    def drop_tail(self) -> None:
        """Give the pages of the tail back."""
        tail = self.tail
        tail.refs = tail.evictable_refs = 0
        self.store.update(tail)
        self.begin(self.last)
        self.uncommitted = 0

    def shorten_tail(self, num_pages: int) -> None:
        """Give back all but the first pages of the tail. They have no host copy."""
        tail = self.tail
        assert tail.device is not None
        self.store.device.give(tail.device[num_pages:])
        del tail.device[num_pages:]
        tail.num_pages, tail.filled = num_pages, min(tail.filled, num_pages * self.page_size)
        if not num_pages:
            tail.device = None
        self.store.update(tail)
        self.forget_extents()

    def give_unfilled_back(self) -> None:
        """Give back the slots that the context was about to fill alone, and the tokens of a page that is not full."""
        for extent in self.extents:
            if extent is self.tail or extent.device is None or extent.refs > 1:
                continue
            num_filled = extent.filled // self.page_size
            if num_filled < extent.num_pages:
                rest = self.store.part(extent, extent.start + num_filled, extent.end)
                assert rest.device is not None
                self.store.device.give(rest.device)
                rest.device, rest.filled = None, 0
                self.store.update(rest, is_alike=True)

    def keep(self, num_pages: int) -> None:
        """Shorten a context that does not run to its first pages, and drop its tail."""
        self.drop_tail()
        while (extent := self.last).end > num_pages:
            if extent.start < num_pages:
                self.store.part(extent, num_pages, extent.end)
            assert extent.parent is not None
            self.last = extent.parent
            self.forget_extents()
            extent.contexts.discard(self)
            self.store.count(extent, evictable_refs=-1)
            self.store.changed(self.last)
        self.tail.start = self.last.end
        self.uncommitted = 0
        self.num_stored = min(self.num_stored, num_pages)

    def publish(self) -> None:
        """Put the leading pages of the tail that are full, computed and accepted into the tree."""
        store, tail = self.store, self.tail
        while tail.tokens and not tail.fetching and not tail.offloading:
            twin = self.last.children.get(tail.key(store.page_bytes))
            if twin is None:
                self._plant(len(tail.tokens) // store.page_bytes)
                return
            # A context that does not run uses the tree's page instead of its own. One that runs keeps its own until it pauses,
            # since the runner knows its slot.
            if self.in_use and twin.device is not None:
                return
            num_pages = common_pages(twin.tokens, bytes(tail.tokens), 0, store.page_bytes)
            twin, own = store.part(twin, twin.start, twin.start + num_pages), self._split(num_pages)
            self.enter(twin)
            self.shared = True
            if twin.device is None and own.device is not None:
                store.place(twin, own.device)
                twin.filled, own.device = num_pages * self.page_size, None
                if own.fresh != NEVER:
                    store.freshen(twin, own.fresh)
            if twin.host is None and own.host is not None:
                twin.host, twin.host_filled, own.host = own.host, own.host_filled, None
                store.update(twin)
            store.update(own)

    def _split(self, num_pages: int) -> PageExtent:
        tail = self.tail
        own = tail.split(num_pages, self.page_size)
        if not tail.num_pages:
            tail.device = tail.host = None
        self.store.update(tail)
        self.forget_extents()
        return own

    def _plant(self, num_pages: int) -> None:
        store, last, own = self.store, self.last, self._split(num_pages)
        own.shareable = last.shareable
        extends = (
            last.parent is not None
            and not last.children
            and last.num_contexts == 1
            and last.residency is own.residency is Residency.DIRTY
            and not last.fetching
            and last.filled == last.num_pages * self.page_size
        )
        if extends and last.device is not None and own.device is not None:
            last.tokens += own.tokens
            last.device.extend(own.device)
            last.num_pages += num_pages
            last.filled += own.filled
            if own.fresh != NEVER:
                store.freshen(last, own.fresh)
            store.update(last)
            return
        last.add_child(own, store.page_bytes)
        own.last_use = max(last.last_use, self.tail.last_use)
        if own.fresh != NEVER:
            store.freshen(own, own.fresh)
        self.enter(own)
        store.changed(own)

    def following(self, tokens: Sequence[int]) -> tuple[list[tuple[PageExtent, int]], int]:
        """The extents behind the last one that have these tokens, without the page of the last token, each with the number of
        its pages that match; and the number of extents up to the last that is not missing."""
        size, page_bytes = self.page_size, self.store.page_bytes
        start, num_full = self.tail.start, (len(tokens) - 1) // self.page_size
        present, alike = 0, list[tuple[PageExtent, int]]()
        if num_full <= start or token_bytes(tokens[start * size : (start + 1) * size]) not in self.last.children:
            return alike, 0
        for extent, num_pages in self.last.matches(token_bytes(tokens[start * size : num_full * size]), page_bytes):
            alike.append((extent, num_pages))
            if extent.residency is not Residency.MISSING:
                present = len(alike)
        return alike, present


def bounds(pages: range) -> tuple[int, int]:
    """The least of consecutive indexes of pages, and the index behind the greatest."""
    if not pages:
        return 0, 0
    return min(pages[0], pages[-1]), max(pages[0], pages[-1]) + 1
