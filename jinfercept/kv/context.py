"""A request's KV as a path of extents, and what can be asked of it in counts and runs of pages."""

from array import array
from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

from jinfercept.kv.context_side import ContextState, ContextWindow
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import Residency
from jinfercept.kv.pool import Slots

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


class Context:
    """The pages of one sequence, first token first; mutable, written by the `KVManager` alone.

    The pages are those of the extents from the root of a tree down to `last`, and behind them those of a private `tail`: the
    page that is not full yet, pages whose last token is not accepted yet, and pages that another context computed, too.

    `held` says whether the references on its pages pin them (the sequence runs) or are evictable (it does not). `ready` is
    the number of leading tokens whose KV is on the device and readable now; it is valid only while the context is held.
    `root` is the name of its tree, and `page_size` the tokens of a page. `shared`: pages of other contexts are or were among
    the pages. `uncommitted` is the least number of accepted tokens with which one more page may be full.
    `num_stored` is the number of leading pages that a disk had when it was last asked; written by the disk tier.
    `side` are its pages in layers with windows that have pages of their own, or its state of recurrent layers; None where the
    model has neither. `side_cost` is the memory of one such page, or of a state, in tokens of KV.

    Its extents and runs are kept until one of the extents changes.
    """

    __slots__ = (
        "_extents",
        "_own_evictable",
        "_runs",
        "held",
        "last",
        "num_stored",
        "page_size",
        "ready",
        "root",
        "shared",
        "side",
        "side_cost",
        "tail",
        "uncommitted",
    )

    def __init__(
        self,
        root: bytes,
        tree: PageExtent,
        page_size: int,
        side: ContextWindow | ContextState | None = None,
        side_cost: float = 0.0,
    ) -> None:
        self.root = root
        self.page_size = page_size
        self.held = False
        self.shared = False
        self.ready = 0
        self.uncommitted = 0
        self.side, self.side_cost = side, side_cost
        self.num_stored = 0
        self.begin(tree)

    def begin(self, last: PageExtent) -> None:
        """Let the pages be those down to this extent, and behind them an empty tail."""
        self.last = last
        self.tail = PageExtent(start=last.end)
        self.tail.refs, self.tail.evictable_refs = int(self.held), int(not self.held)
        self.tail.contexts.add(self)
        self.forget_extents()

    def forget_extents(self) -> None:
        """Find the extents anew, and the runs."""
        self._extents: list[PageExtent] | None = None
        self.forget_runs()

    def forget_runs(self) -> None:
        """Find the runs anew: what they show of an extent has changed."""
        self._runs: list[PageRun] | None = None
        self._own_evictable: list[PageRun] | None = None

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

    @property
    def own_evictable(self) -> list[PageRun]:
        """The runs on the device that can be freed, that no other context has and that no plan copies; not to be changed."""
        runs = self._own_evictable
        if runs is None:
            runs = [run for run in self.runs() if run.evictable and not (run.shared or run.in_flight)]
            self._own_evictable = runs
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


def bounds(pages: range) -> tuple[int, int]:
    """The least index of consecutive pages, and the one after the greatest."""
    if not pages:
        return 0, 0
    return min(pages[0], pages[-1]), max(pages[0], pages[-1]) + 1
