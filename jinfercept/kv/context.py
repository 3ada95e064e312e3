"""A request's KV as an ordered list of pages, and what can be asked of it in counts and runs of pages."""

from itertools import groupby
from typing import NamedTuple

from jinfercept.kv.page import Page, Residency


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

    `held` says whether the references on its pages pin them (the sequence runs) or are evictable (it does not). `ready` is
    the number of leading tokens whose KV is on the device and readable now; it is valid only while the context is held.
    `chain` holds the digests of the leading full pages whose tokens are accepted. `shared`: pages of other contexts are or
    were among the pages.
    """

    __slots__ = ("chain", "held", "pages", "ready", "root", "shared")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.pages: list[Page] = []
        self.chain: list[bytes] = []
        self.held = False
        self.shared = False
        self.ready = 0

    @property
    def num_pages(self) -> int:
        """Pages, wherever they are."""
        return len(self.pages)

    @property
    def tail_first(self) -> range:
        """Indexes of all pages, last token first."""
        return range(len(self.pages) - 1, -1, -1)

    def runs(self, pages: range | None = None) -> list[PageRun]:
        """The pages as runs of pages that are alike.

        Args:
            pages: indexes of some of them, one after the other, which also give the order of the runs; None: all, first
                token first.
        """
        first, last = bounds(range(len(self.pages)) if pages is None else pages)
        runs = list[PageRun]()
        for (residency, shared, evictable, in_flight), alike in groupby(self.pages[first:last], _kind):
            filled = [page.host_filled if residency is Residency.HOST else page.filled for page in alike]
            runs.append(PageRun(first, len(filled), residency, shared, evictable, in_flight, sum(filled)))
            first += len(filled)
        return runs if pages is None or pages.step > 0 else runs[::-1]

    def residency(self, num_tokens: int) -> ContextResidency:
        """The tokens by place.

        Args:
            num_tokens: leading tokens that were ever computed.
        """
        device = host = 0
        for page in self.pages:
            if page.device is not None:
                device += page.filled
            else:
                host += page.host_filled
        return ContextResidency(device, host, max(0, num_tokens - device - host))

    @property
    def is_lost(self) -> bool:
        """Whether every page is missing."""
        return all(page.residency is Residency.MISSING for page in self.pages)

    @property
    def own_tokens(self) -> int:
        """Tokens on the device that no other context refers to: C of the waste equations."""
        return sum([page.filled for page in self.pages if page.refs + page.evictable_refs == 1])

    def slots(self, start: int, end: int) -> list[int]:
        """The device slots of the pages `start … end - 1`, all of which have one."""
        slots = [page.device for page in self.pages[start:end]]
        assert None not in slots
        return slots  # pyright: ignore[reportReturnType] # none is None


def bounds(pages: range) -> tuple[int, int]:
    """The least index of consecutive pages, and the one after the greatest."""
    if not pages:
        return 0, 0
    return min(pages[0], pages[-1]), max(pages[0], pages[-1]) + 1


def _kind(page: Page) -> tuple[Residency, bool, bool, bool]:
    evictable = page.device is not None and not page.refs and not page.fetching
    return page.residency, page.refs + page.evictable_refs > 1, evictable, page.fetching or page.offloading
