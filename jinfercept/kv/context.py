"""A request's KV as a path of extents: what can be asked of it in counts and runs of pages, and how its pages enter the tree of
extents, where it shares those of others, and how they are given back.
"""

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
    """Tokens of a context by place, when its sequence starts to run.

    Attributes:
        device: readable on the device.
        host: only on the host, to be fetched.
        missing: at neither place, to be recomputed.
    """

    device: int
    host: int
    missing: int


class PageRun(NamedTuple):
    """Consecutive pages of a context that are alike.

    Attributes:
        start: index of the first one in the context.
        num_pages: how many there are.
        residency: of each page.
        shared: other contexts have each page, too.
        evictable: the device slots can be freed now: no running sequence has the pages, and none is on its way in.
        in_flight: the plan being built copies each page, in either direction.
        num_tokens: tokens whose KV they hold, on the device if they are there, else on the host.
    """

    start: int
    num_pages: int
    residency: Residency
    shared: bool
    evictable: bool
    in_flight: bool
    num_tokens: int

    @property
    def pages(self) -> range:
        """Indexes of the pages in the context, first token first."""
        return range(self.start, self.start + self.num_pages)


NOT_READ = 1 << 60
"""A position that no plan computes."""


class ContextSide:
    """What a context has beside its pages; mutable, written by the `SidePool` alone.

    Attributes:
        fetching: the plan being built brings it to the device: it is readable from the next plan on.
        offloading: the plan being built copies it to the host, all or a part.
        cuts: indexes behind pages at which other contexts are likely to part from this one, ascending; see `SidePool.share`.
        marked: the checkpoints there that are made.
    """

    __slots__ = ("cuts", "fetching", "marked", "offloading")

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.marked: list[ContextCheckpoint] = []
        self.fetching = self.offloading = False


@final
class ContextWindow(ContextSide):
    """The pages of one context in the layers with windows; mutable, written by the `WindowPool` alone.

    Attributes:
        first: index of the first page that has a device slot.
        slots: device slots of that page and the pages behind it, as many as there are.
        host_first, host_slots: likewise the slots of host copies.
        read_from: least position whose query the plan being built computes.
    """

    __slots__ = ("first", "host_first", "host_slots", "read_from", "slots")

    def __init__(self) -> None:
        super().__init__()
        self.first = self.host_first = 0
        self.slots: Slots = array("i")
        self.host_slots: Slots = array("i")
        self.read_from = NOT_READ

    @property
    def end(self) -> int:
        """Index behind the last page that has a device slot."""
        return self.first + len(self.slots)

    @property
    def host_end(self) -> int:
        """Index behind the last page that has a host copy."""
        return self.host_first + len(self.host_slots)

    def add(self, slots: Slots) -> None:
        """Use device slots for the next pages; without any, for those that have host copies, if there are some."""
        if self.host_slots and not self.slots:
            self.first = self.host_first
        self.slots.extend(slots)

    def append(self, index: int) -> bool:
        """Whether the next token goes to the page of an index that has a device slot and no copy."""
        return self.host_first + len(self.host_slots) <= index < self.first + len(self.slots)


@final
class ContextState(ContextSide):
    """The state of one context in the recurrent layers; mutable, written by the `StatePool` alone.

    Attributes:
        slot: device slot that the context alone has, in which its state is and which its next chunk writes; 0: there is none.
        source: device slot that others have, too, from which its next chunk begins; 0: there is none.
        host: slot of the host copy; -1: there is none.
        position: leading tokens that the state and its copy have seen, behind the plan being built.
        last_page: the checkpoint behind the last page that it has filled one token at a time.
    """

    __slots__ = ("host", "last_page", "position", "slot", "source")

    def __init__(self) -> None:
        super().__init__()
        self.slot = self.source = self.position = 0
        self.host = -1
        self.last_page: ContextCheckpoint | None = None

    @property
    def slots(self) -> Slots:
        """The device slot where the state is; none if it is not on the device."""
        slot = self.source or self.slot
        return array("i", (slot,) if slot else ())

    @property
    def host_slots(self) -> Slots:
        """The slot of the host copy, if there is one."""
        return array("i", (self.host,) if self.host >= 0 else ())

    def add(self, slots: Slots) -> None:
        """Use a device slot, from the next chunk on or for what is fetched."""
        (self.slot,) = slots

    def append(self, index: int) -> bool:
        """Note that the plan being built computes the next token; False if that takes another slot or ends a copy."""
        if not self.slot or self.source or self.host >= 0:
            return False
        self.position += 1  # its slot is not noted as written: a sequence that a plan computes is not preempted in it
        return True


class Context:
    """The pages of one sequence, first token first; mutable, changed by the `KVManager` alone.

    The pages are those of the extents from the root of a tree down to `last`, and behind them those of a private `tail`: the
    page that is not full yet, pages whose last token is not accepted yet, and pages that another context computed, too.

    `in_use` says whether the references on its pages pin them (the sequence runs) or are evictable (it does not). `ready` is
    the number of leading tokens whose KV is on the device and readable now; it is valid only while the context is in use.
    `root` is the name of its tree, `store` has its extents, and a page has `page_size` tokens. `shared`: pages of other
    contexts are or were among the pages. `uncommitted` is the least number of accepted tokens with which one more page may be
    full. `num_stored` is the number of leading pages that a disk had when it was last asked; written by the disk tier.
    `side` are its pages in layers with windows that have pages of their own, or its state of recurrent layers; None where the
    model has neither. `side_cost` is the memory of one such page, or of a state, in tokens of KV.

    Its extents and runs are kept until one of the extents changes.
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
        self.root = root
        self.store, self.page_size = store, store.page_size
        self.in_use = False
        self.shared = False
        self.ready = 0
        self.uncommitted = 0
        self.side: ContextWindow | ContextState | None = None
        self.side_cost = 0.0
        self.num_stored = 0
        self.begin(tree)

    def begin(self, last: PageExtent) -> None:
        """Let the pages be those down to this extent, and behind them an empty tail."""
        self.last = last
        self.tail = PageExtent(start=last.end)
        self.tail.refs, self.tail.evictable_refs = int(self.in_use), int(not self.in_use)
        self.tail.contexts.add(self)
        self.forget_extents()

    def forget_extents(self) -> None:
        """Find the extents anew, and the runs."""
        self._extents: list[PageExtent] | None = None
        self.forget_runs()

    def forget_runs(self) -> None:
        """Find the runs anew: what they show of an extent has changed."""
        self._runs: list[PageRun] | None = None

    @property
    def num_pages(self) -> int:
        """Pages, wherever they are."""
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
        """The extents of a page and of those behind it, first token first."""
        extents = self.extents
        first = bisect_right(extents, index, key=_START)
        if first and extents[first - 1].end > index:
            first -= 1
        return extents[first:]

    def parts(self, first: int, last: int) -> list[tuple[PageExtent, int, int]]:
        """The extents of the pages `first … last - 1`; with each the first of those pages that it has, and the one behind."""
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
            pages: indexes of some of them, one after the other, which also give the order of the runs; None: all, first
                token first.
        """
        if pages is not None:
            runs = self._alike(*bounds(pages))
            return runs if pages.step > 0 else runs[::-1]
        runs = self._runs
        if runs is None:
            runs = self._runs = self._alike(0, self.num_pages)
        return runs

    def _alike(self, first: int, last: int) -> list[PageRun]:
        """The pages `first … last - 1` as runs of pages that are alike."""
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
        """The tokens by place.

        Args:
            num_tokens: leading tokens that were ever computed.
        """
        device = host = 0
        for extent in self.extents:
            if extent.device is not None:
                device += extent.filled
            else:
                host += extent.host_filled
        return ContextResidency(device, host, max(0, num_tokens - device - host))

    def lacks(self, num_tokens: int) -> tuple[list[tuple[int, int]], int]:
        """What is missing of so many tokens: the first token and the end of each gap; and the tokens that only the host has."""
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
        """Whether every page is missing."""
        return all(extent.residency is Residency.MISSING for extent in self.extents)

    @property
    def own_tokens(self) -> int:
        """Tokens on the device that no other context refers to: C of the waste equations."""
        return sum([extent.filled for extent in self.extents if extent.num_contexts == 1])

    @property
    def state_tokens(self) -> int:
        """Tokens of KV that take as much memory as its state of recurrent layers and its pages of layers with windows."""
        return 0 if self.side is None else round(len(self.side.slots) * self.side_cost)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV are on the device or on the host."""
        return sum([extent.num_tokens for extent in self.extents])

    @property
    def is_whole(self) -> bool:
        """Whether no page is missing."""
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
        """Have the pages of an extent behind the last one, too."""
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
        """Give the last pages of the tail back, which have no host copy."""
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
        """Give the slots back that the context was about to fill alone, with the tokens of a page that is not full."""
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
        """Put the leading pages of the tail into the tree that are full, computed and accepted.

        Where the tree has such pages, a context that does not run has these instead of its own. One that runs keeps its own
        until it pauses, since the runner knows their slots.
        """
        store, tail = self.store, self.tail
        while tail.tokens and not tail.fetching and not tail.offloading:
            twin = self.last.children.get(tail.key(store.page_bytes))
            if twin is None:
                self._plant(len(tail.tokens) // store.page_bytes)
                return
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
        """The first pages of the tail, without references; the tail has the others."""
        tail = self.tail
        own = tail.split(num_pages, self.page_size)
        if not tail.num_pages:
            tail.device = tail.host = None
        self.store.update(tail)
        self.forget_extents()
        return own

    def _plant(self, num_pages: int) -> None:
        """Put so many pages of the tail into the tree, where no other context has such pages."""
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
        """The extents behind the last one that have these tokens, but for the page of the last token.

        Returns:
            Each with the number of its pages that are alike; and how many of them there are up to the last that is not missing.
        """
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
    """The least index of consecutive pages, and the one after the greatest."""
    if not pages:
        return 0, 0
    return min(pages[0], pages[-1]), max(pages[0], pages[-1]) + 1
