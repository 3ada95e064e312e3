"""The only door to pages: who uses which, where they are, what may be lost. Decides nothing: policies do.

Device slots are free, used (referenced), claimed (a paused context wants them back) or cached (a finished prefix, nobody
waits for it). Used pages stay; the other two may be taken at any time. Host slots are free or hold a copy; a copy is
spare when no paused context counts on it.

All changes are made while a plan is drafted, between `begin` and the end of the draft; the runner executes a plan as
fetch, drop, copy-out, compute, land, which is what allows a device slot to be reused inside the plan that copies it out.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jinfercept.kv.context import Context, Found
from jinfercept.kv.page import Page, Residency, chain_digest, root_digest
from jinfercept.kv.pool import SlotPool


class PageCopy(NamedTuple):
    """One page on its way between the memories, in either direction."""

    device_slot: int
    host_slot: int


class Occupancy(NamedTuple):
    """Pages of the device pool by kind; they add up to `total`."""

    free: int
    used: int
    claimed: int
    cached: int
    total: int


class KVManager:
    """Pages of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        page_size: tokens per page.
        identity: what the KV depends on besides the tokens (model, dtype): contexts of different identity share nothing.
        prefix_caching: keep full pages of finished requests until their slots are wanted.
    """

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int,
        page_size: int,
        *,
        identity: str = "",
        prefix_caching: bool = True,
    ) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._identity = identity
        self._device = SlotPool(num_device_pages, first=1)
        self._host = SlotPool(num_host_pages)
        self._index: dict[bytes, Page] = {}
        self._claimed: OrderedDict[Page, None] = OrderedDict()  # on the device, claimed by paused contexts only
        self._cached: OrderedDict[Page, None] = OrderedDict()  # on the device, unclaimed; least recently used first
        self._spare: OrderedDict[Page, None] = OrderedDict()  # host copies that no paused context counts on
        self._landing: list[Page] = []
        self._filling: set[Page] = set()  # referenced, and full only after this plan's compute
        self._leaving: dict[int, Page] = {}  # by host slot
        self._dropped: list[int] = []
        self._late_drops: list[int] = []  # host and device slots that this plan still fills: free from the next one on
        self._late_slots: list[int] = []

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._device.num_free

    @property
    def num_cached(self) -> int:
        """Device slots of finished prefixes: to be had with `evict_cached`."""
        return len(self._cached)

    @property
    def num_claimed(self) -> int:
        """Device slots that only paused contexts count on: a policy decides which of them go."""
        return len(self._claimed)

    @property
    def num_host_free(self) -> int:
        """Host slots to be had without loss to a paused context."""
        return self._host.num_free + len(self._spare)

    @property
    def num_host_pages(self) -> int:
        return self._host.size

    def occupancy(self) -> Occupancy:
        """The device pool by kind."""
        free, claimed, cached, total = self.num_free, len(self._claimed), len(self._cached), self._device.size
        return Occupancy(free, total - free - claimed - cached, claimed, cached, total)

    @property
    def num_host_used(self) -> int:
        return self._host.size - self._host.num_free

    # -- a plan begins ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a plan: what the last one fetched can be read, what it copied out can be fetched."""
        for page in self._landing:
            page.landing = False
        self._landing.clear()
        self._filling.clear()
        arrived = list(self._leaving.values())
        self._leaving.clear()
        for page in arrived:
            page.leaving = False
            self._file(page)
        for slot in self._late_drops:
            self._dropped.append(slot)
            self._host.give(slot)
        self._late_drops.clear()
        for slot in self._late_slots:
            self._device.give(slot)
        self._late_slots.clear()

    def drain_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    # -- contexts --------------------------------------------------------------------------------------------------

    def open(self, salt: str = "") -> Context:
        """A new, empty context. Contexts of different `salt` share no pages."""
        return Context(root_digest(self._identity, self.page_size, salt))

    def refresh(self, context: Context, tokens: Sequence[int]) -> None:
        """Adopt whatever others have computed: for missing pages, and for full pages of `tokens` beyond the context's end.

        The page of the last token is never adopted whole: somebody has to compute that token's logits.
        """
        assert not context.held
        num_full = (len(tokens) - 1) // self.page_size
        self._extend_chain(context, tokens, num_full)
        for index in range(num_full):
            if index < len(context.pages) and context.pages[index].residency is not Residency.MISSING:
                continue
            found = self._index.get(context.chain[index])
            if found is None:
                if index >= len(context.pages):
                    break
                continue
            if index < len(context.pages):
                self._count(context.pages[index], claims=-1)
                context.pages[index] = found
            else:
                context.pages.append(found)
            self._count(found, claims=1)

    def hold(self, context: Context) -> None:
        """The sequence starts to run: turn its claims into references."""
        assert not context.held
        context.held = True
        for page in context.pages:
            self._count(page, refs=1, claims=-1)
        context.ready = 0
        self.advance(context)

    def release(self, context: Context) -> None:
        """The sequence pauses: turn its references into claims."""
        assert context.held
        context.held = False
        for page in context.pages:
            self._count(page, refs=-1, claims=1)

    def close(self, context: Context) -> None:
        """The sequence is gone: give everything back, children before parents."""
        for page in reversed(context.pages):
            if context.held:
                self._count(page, refs=-1)
            else:
                self._count(page, claims=-1)
        context.pages.clear()
        context.held = False

    def commit(self, context: Context, tokens: Sequence[int]) -> None:
        """Name the pages that are full, computed and accepted, so that others can share them.

        Args:
            tokens: every accepted token of the sequence.
        """
        first = len(context.chain)
        num_full = min(len(tokens) // self.page_size, len(context.pages))
        if num_full <= first:
            return
        self._extend_chain(context, tokens, num_full)
        for index in range(first, num_full):
            self._name(context, index)

    # -- computing -------------------------------------------------------------------------------------------------

    def advance(self, context: Context) -> None:
        """Move `ready` over pages that can be read now."""
        size, pages = self.page_size, context.pages
        while (index := context.ready // size) < len(pages):
            page = pages[index]
            end = index * size + page.filled
            if page.device is None or page.landing or end <= context.ready:
                return
            context.ready = end

    def gap_end(self, context: Context, limit: int) -> int:
        """Where the run of tokens to be computed from `ready` on ends: at a page that is, or can be brought, there.

        Args:
            limit: number of tokens of the sequence.
        """
        size = self.page_size
        index = context.ready // size
        if index < len(context.pages):
            page = context.pages[index]
            if page.landing or (page.device is None and page.host is not None):
                return context.ready
        while (index := index + 1) * size < limit:
            if index < len(context.pages) and context.pages[index].residency is not Residency.MISSING:
                return index * size
        return limit

    def needs_slot(self, context: Context, position: int) -> bool:
        """Whether the token at `position` needs a device slot that its page does not have."""
        index = position // self.page_size
        return index >= len(context.pages) or context.pages[index].device is None

    def give_slot(self, context: Context, position: int) -> None:
        """Put a free device slot under the token at `position`. There must be one; earlier pages must exist."""
        index = position // self.page_size
        assert context.held
        if index == len(context.pages):
            page = Page()
            page.refs = 1
            context.pages.append(page)
        self._place(context.pages[index])

    def append(self, context: Context) -> bool:
        """Note that the plan computes the token at `ready`, if its page is there and nothing else follows from it."""
        index, offset = divmod(context.ready, self.page_size)
        if index >= len(context.pages):
            return False
        page = context.pages[index]
        if page.filled != offset or page.device is None or page.host is not None:
            return False
        page.filled = offset + 1
        context.ready += 1
        if page.filled == self.page_size:
            self._filling.add(page)
            self._name(context, index)
        return True

    def computed(self, context: Context, start: int, end: int) -> None:
        """The plan computes the tokens `start … end - 1`: note it, and forget host copies that are now too short."""
        size = self.page_size
        for index in range(start // size, (end - 1) // size + 1):
            page = context.pages[index]
            assert page.device is not None
            filled = min(end - index * size, size)
            if filled > page.filled:
                page.filled = filled
                if page.host is not None and page.host_filled < filled:
                    self.drop_host(page)
                if filled == size:
                    self._filling.add(page)
                    self._name(context, index)
        if start <= context.ready:
            context.ready = max(context.ready, end)
        self.advance(context)

    # -- moving ----------------------------------------------------------------------------------------------------

    def missing_slots(self, context: Context) -> int:
        """Pages of the context that have no device slot."""
        return sum(page.device is None for page in context.pages)

    def survey(self, context: Context, num_tokens: int) -> Found:
        """Where the KV of the context's first `num_tokens` tokens, all computed once, is now."""
        device = sum(page.filled for page in context.pages if page.device is not None)
        host = sum(page.host_filled for page in context.pages if page.device is None)
        return Found(device, host, max(0, num_tokens - device - host))

    def host_only(self, context: Context) -> Iterator[Page]:
        """The pages that can be fetched now, first token first."""
        return (page for page in context.pages if page.device is None and page.host is not None and not page.leaving)

    def fetch(self, page: Page) -> PageCopy:
        """Bring a host page to a free device slot (there must be one); readable from the next plan on."""
        assert page.host is not None
        assert not page.leaving
        host = page.host
        self._place(page)
        assert page.device is not None
        page.filled = page.host_filled
        page.landing = True
        self._landing.append(page)
        return PageCopy(page.device, host)

    def copy_out(self, page: Page) -> PageCopy | None:
        """Copy a dirty page to the host; None if it may still change, or no host slot is to be had without loss."""
        changes = page.refs > 0 and (page.filled < self.page_size or page in self._filling)
        if changes or page.landing or page.residency is not Residency.DIRTY:
            return None
        if not self._host.num_free and not self._evict_spare():
            return None
        assert page.device is not None
        page.host, page.host_filled, page.leaving = self._host.take(), page.filled, True
        self._leaving[page.host] = page
        self._file(page)
        return PageCopy(page.device, page.host)

    def drop_device(self, page: Page) -> bool:
        """Free the device slot of a page; False if it is in use, on its way in, or not there."""
        if page.refs or page.landing or page.device is None:
            return False
        self._device.give(page.device)
        page.device, page.filled = None, 0
        self._file(page)
        return True

    def drop_host(self, page: Page) -> None:
        """Free the host copy of a page."""
        self._free_host(page)
        self._file(page)

    def evict_cached(self) -> bool:
        """Free one device slot of the least recently used finished prefix; False if there is none."""
        if not self._cached:
            return False
        return self.drop_device(next(iter(self._cached)))

    def evict_claimed(self) -> bool:
        """Free the device slot of the page that paused contexts have claimed longest; False if there is none to be had."""
        return any(self.drop_device(page) for page in list(self._claimed))

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, contexts: Sequence[Context]) -> None:
        """Assert that pages, references, slots and indexes agree; `contexts` are all open ones."""
        refs: Counter[Page] = Counter()
        claims: Counter[Page] = Counter()
        for context in contexts:
            (refs if context.held else claims).update(context.pages)
        pages = {*refs, *claims, *self._cached, *self._spare, *self._index.values()}
        for page in pages:
            assert page.host is None or page.device is None or page.host_filled == page.filled, f"stale copy: {page}"
            assert page.refs == refs[page], f"references of {page}: {refs[page]} contexts use it"
            assert page.claims == claims[page], f"claims on {page}: {claims[page]} contexts wait for it"
            assert page.refs + page.claims > 0 or page.digest, f"nobody knows {page}"
            assert (page.device is None) == (page.filled == 0) or page.refs, f"an empty slot: {page}"
            assert (page in self._cached) == (page.device is not None and not page.refs and not page.claims)
            assert (page in self._claimed) == (page.device is not None and not page.refs and page.claims > 0)
            assert (page in self._spare) == self._is_spare(page), f"spare or not: {page}"
            indexed = page.digest is not None and self._index.get(page.digest) is page
            assert not indexed or page.residency is not Residency.MISSING, f"indexed and missing: {page}"
        self._device.check([*(page.device for page in pages if page.device is not None), *self._late_slots])
        self._host.check([*(page.host for page in pages if page.host is not None), *self._late_drops])
        occupancy = self.occupancy()
        used = sum(page.device is not None and page.refs > 0 for page in pages)
        assert occupancy.used == used + len(self._late_slots)
        assert sum(occupancy[:4]) == occupancy.total

    def clear(self) -> None:
        """Forget every finished prefix, on the device and on the host (the weights changed, or the arrays were lost)."""
        for page in [*self._cached, *self._spare]:
            if not page.refs and not page.claims:
                self.drop_device(page)
                if page.host is not None:
                    self.drop_host(page)

    def _extend_chain(self, context: Context, tokens: Sequence[int], num_full: int) -> None:
        size = self.page_size
        for index in range(len(context.chain), num_full):
            parent = context.chain[-1] if context.chain else context.root
            context.chain.append(chain_digest(parent, tokens[index * size : (index + 1) * size]))

    def _name(self, context: Context, index: int) -> None:
        """Index a page once it is full, computed and its tokens are accepted (that is: in the chain)."""
        page = context.pages[index]
        if index < len(context.chain) and self.page_size in (page.filled, page.host_filled):
            page.digest = context.chain[index]
            self._index.setdefault(page.digest, page)

    def _place(self, page: Page) -> None:
        assert page.refs
        assert page.device is None
        page.device, page.filled = self._device.take(), 0
        self._file(page)

    def _count(self, page: Page, refs: int = 0, claims: int = 0) -> None:
        """Change the counts and everything that follows from them."""
        page.refs += refs
        page.claims += claims
        self._file(page)

    def _is_spare(self, page: Page) -> bool:
        if page.host is None or page.leaving:
            return False
        return page.device is not None if page.refs else not page.claims

    def _worth_keeping(self, page: Page) -> bool:
        full = self.page_size in (page.filled, page.host_filled)
        return self.prefix_caching and full and page.digest is not None and self._index.get(page.digest) is page

    def _file(self, page: Page) -> None:
        """Put the page on the lists where it belongs now, or free it if nobody needs it."""
        if page.digest is not None and page.residency is Residency.MISSING and self._index.get(page.digest) is page:
            del self._index[page.digest]
        if not page.refs and not page.claims and not self._worth_keeping(page):
            self._forget(page)
        here = None
        if page.device is not None and not page.refs:
            here = self._claimed if page.claims else self._cached
        for members in (self._claimed, self._cached):
            if members is here:
                members.setdefault(page)
            else:
                members.pop(page, None)
        if self._is_spare(page):
            self._spare.setdefault(page)
        else:
            self._spare.pop(page, None)

    def _forget(self, page: Page) -> None:
        if page.device is not None:
            if page.landing:
                page.landing = False
                self._landing.remove(page)
                self._late_slots.append(page.device)
            else:
                self._device.give(page.device)
            page.device, page.filled = None, 0
        if page.host is not None:
            self._free_host(page)
        if page.digest is not None and self._index.get(page.digest) is page:
            del self._index[page.digest]

    def _free_host(self, page: Page) -> None:
        """Give the host slot back: at once, or after this plan if this plan fills it."""
        assert page.host is not None
        if page.leaving:
            page.leaving = False
            del self._leaving[page.host]
            self._late_drops.append(page.host)
        else:
            self._dropped.append(page.host)
            self._host.give(page.host)
        page.host, page.host_filled = None, 0

    def _evict_spare(self) -> bool:
        if not self._spare:
            return False
        self.drop_host(next(iter(self._spare)))
        return True
