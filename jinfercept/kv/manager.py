"""The only way to pages: contexts and their references, device slots, copies between the memories.

A caller asks in contexts and counts of pages. A running context holds references on its pages, a paused one evictable
references. A policy's move names pages by a range of their indexes in the context.
"""

from collections import Counter
from collections.abc import Sequence
from secrets import token_bytes
from typing import final

from jinfercept.kv.context import Context
from jinfercept.kv.page import Occupancy, Page, PageCopy, Residency, chain_digest, root_digest
from jinfercept.kv.store import PageStore


@final
class KVManager:
    """Contexts of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        page_size: tokens per page.
        identity: of the model and the dtype, which KV depends on besides the tokens; different identities share no pages.
        prefix_caching: keep full pages of finished requests until their slots are needed.
        most_moved_pages: pages that one plan may move over the host link, both ways together; None: any number.
    """

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int,
        page_size: int,
        *,
        identity: str = "",
        prefix_caching: bool = True,
        most_moved_pages: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.most_moved_pages = most_moved_pages
        self._store = PageStore(num_device_pages, num_host_pages, page_size, prefix_caching)
        self._identity = identity

    # -- contexts --------------------------------------------------------------------------------------------------

    def open(self, salt: str = "") -> Context:
        """A new, empty context. Contexts of different `salt` share no pages."""
        return Context(root_digest(self._identity, self.page_size, salt))

    def refresh(self, context: Context, tokens: Sequence[int]) -> None:
        """Share the indexed pages of other contexts: for missing pages, and for full pages of `tokens` beyond the last page.

        The page that ends with the last token is left out: the logits of that token have to be computed.
        """
        assert not context.held
        num_full = (len(tokens) - 1) // self.page_size
        self._extend_chain(context, tokens, num_full)
        for index in range(num_full):
            if index < len(context.pages) and context.pages[index].residency is not Residency.MISSING:
                continue
            page = self._store.find(context.chain[index])
            if page is None:
                if index >= len(context.pages):
                    break
                continue
            if index < len(context.pages):
                self._store.count(context.pages[index], evictable_refs=-1)
                context.pages[index] = page
            else:
                context.pages.append(page)
            self._store.count(page, evictable_refs=1)
            context.shared = True

    def digests(self, context: Context, tokens: Sequence[int]) -> Sequence[bytes]:
        """The chained digests of the full pages of these tokens, first page first, whether the pages exist or not.

        Args:
            context: its chain is extended to these tokens.
            tokens: of the context, all accepted.
        """
        self._extend_chain(context, tokens, len(tokens) // self.page_size)
        return context.chain

    def hold(self, context: Context) -> None:
        """The sequence starts to run: turn its evictable references into references."""
        assert not context.held
        context.held = True
        for page in context.pages:
            self._store.count(page, refs=1, evictable_refs=-1)
        context.ready = 0
        self.advance(context)

    def release(self, context: Context) -> None:
        """The sequence pauses: turn its references into evictable references. Pages for tokens that did not come are free."""
        self.trim(context)
        context.held = False
        for page in context.pages:
            self._store.count(page, refs=-1, evictable_refs=1)

    def close(self, context: Context) -> None:
        """The sequence is finished: give its references back, children before parents."""
        for page in reversed(context.pages):
            if context.held:
                self._store.count(page, refs=-1)
            else:
                self._store.count(page, evictable_refs=-1)
        context.pages.clear()
        context.held = False

    def forget(self, context: Context) -> None:
        """No other context gets the pages from now on; those that have some of them keep them."""
        for page in context.pages:
            self._store.forget(page)

    def isolate(self, context: Context) -> None:
        """Forget the pages and give them back: the context is empty, and shares no page from now on."""
        self.forget(context)
        self.close(context)
        context.root, context.shared, context.ready = token_bytes(), False, 0
        context.chain.clear()

    def cut(self, context: Context, num_tokens: int) -> None:
        """Shorten a context to the pages whose tokens are all among the first `num_tokens`, and give the others back."""
        assert not context.held
        size = self.page_size
        num_retained = num_tokens // size
        if num_retained < len(context.pages):
            page = context.pages[num_retained]
            if num_retained * size + max(page.filled, page.host_filled) <= num_tokens and page.digest is None:
                num_retained += 1  # the private tail page, whose tokens all stay
        for page in reversed(context.pages[num_retained:]):
            self._store.count(page, evictable_refs=-1)
        del context.pages[num_retained:]
        del context.chain[num_tokens // size :]

    def commit(self, context: Context, tokens: Sequence[int]) -> None:
        """Index the pages that are full, computed and accepted, so that other contexts can share them.

        Args:
            tokens: every accepted token of the sequence.
        """
        first, num_full = len(context.chain), len(tokens) // self.page_size
        if num_full <= first:  # almost always
            return
        num_full = min(num_full, len(context.pages))
        self._extend_chain(context, tokens, num_full)
        for index in range(first, num_full):
            self._index(context, index)

    # -- computing -------------------------------------------------------------------------------------------------

    def advance(self, context: Context) -> None:
        """Move `ready` forward over the pages that are readable now."""
        size, pages = self.page_size, context.pages
        while (index := context.ready // size) < len(pages):
            page = pages[index]
            end = index * size + page.filled
            if page.device is None or page.fetching or end <= context.ready:
                return
            context.ready = end

    def gap_end(self, context: Context, limit: int) -> int:
        """End of the tokens to compute from `ready` on: the next page on the device or the host, or `limit`.

        Args:
            limit: tokens of the sequence.
        """
        size = self.page_size
        index = context.ready // size
        if index < len(context.pages):
            page = context.pages[index]
            if page.fetching or (page.device is None and page.host is not None):
                return context.ready
        while (index := index + 1) * size < limit:
            if index < len(context.pages) and context.pages[index].residency is not Residency.MISSING:
                return index * size
        return limit

    def computable(self, context: Context, limit: int) -> int:
        """Tokens of a held context from its first unreadable one on, up to `limit`, that can be computed before any fetch."""
        self.advance(context)
        return max(0, self.gap_end(context, limit) - context.ready) if context.ready < limit else 0

    def slots_needed(self, context: Context, num_tokens: int) -> int:
        """Device slots that the context lacks for so many tokens."""
        num_pages = (num_tokens - 1) // self.page_size + 1
        lacking = sum(page.device is None for page in context.pages)
        return lacking + max(0, num_pages - len(context.pages))

    def pages_between(self, start: int, end: int) -> int:
        """Pages of the tokens `start … end - 1`."""
        return (end - 1) // self.page_size - start // self.page_size + 1

    def free_slot(self) -> bool:
        """Whether a device slot is free; if none is, the least recently used page of finished prefixes gives up its own."""
        return self._store.num_free > 0 or self._store.evict_cached()

    def place(self, context: Context, start: int, end: int) -> int:
        """Give the pages of the tokens `start … end - 1` of a held context the device slots that `free_slot` finds.

        Returns:
            `end`, or the first of the tokens whose page has no slot.
        """
        assert context.held
        size, pages = self.page_size, context.pages
        for index in range(start // size, (end - 1) // size + 1) if start < end else ():
            if index < len(pages) and pages[index].device is not None:
                continue
            if not self.free_slot():
                return max(start, index * size)
            if index == len(pages):
                pages.append(Page())
                pages[index].refs = 1
            self._store.place(pages[index])
        return end

    def append(self, context: Context, num_known: int) -> bool:
        """Note that the plan computes the token at `ready`; False if that takes more than a count: `computed` does it.

        Args:
            num_known: leading pages whose slots the runner knows.
        """
        index, offset = divmod(context.ready, self.page_size)
        if index >= len(context.pages) or num_known < len(context.pages):
            return False
        page = context.pages[index]
        if page.filled != offset or page.device is None or page.host is not None:
            return False
        page.filled = offset + 1
        context.ready += 1
        if page.filled == self.page_size:
            self._store.fill(page)
            self._index(context, index)
        return True

    def computed(self, context: Context, start: int, end: int) -> None:
        """Note that the plan computes the tokens `start … end - 1`, and drop host copies that are now too short."""
        size = self.page_size
        for index in range(start // size, (end - 1) // size + 1):
            page = context.pages[index]
            assert page.device is not None
            filled = min(end - index * size, size)
            if filled > page.filled:
                page.filled = filled
                if page.host is not None and page.host_filled < filled:
                    self._store.drop_host(page)
                if filled == size:
                    self._store.fill(page)
                    self._index(context, index)
        if start <= context.ready:
            context.ready = max(context.ready, end)
        self.advance(context)

    def trim(self, context: Context) -> int:
        """Give back the last pages of a held context that have a device slot and no token; returns how many pages are left."""
        assert context.held
        pages = context.pages
        while pages and pages[-1].device is not None and not pages[-1].filled:
            self._store.count(pages.pop(), refs=-1)
        return len(pages)

    # -- moving ----------------------------------------------------------------------------------------------------

    def num_fetchable(self, context: Context) -> int:
        """Pages of the context that can be fetched from the host now."""
        pages = context.pages
        return sum([page.device is None and page.host is not None and not page.offloading for page in pages])

    def fetch(self, context: Context, most: int, pages: range | None = None) -> tuple[list[PageCopy], int]:
        """Fetch up to `most` pages of a context to the device slots that `free_slot` finds.

        They are readable from the next plan on.

        Args:
            pages: indexes of some of them, in the order in which they are fetched; None: all, first token first.

        Returns:
            The copies to make, and the tokens whose KV they move.
        """
        copies, num_tokens = list[PageCopy](), 0
        for page in context.pages if pages is None else map(context.pages.__getitem__, pages):
            if page.device is not None or not _is_fetchable(page):
                continue
            if len(copies) == most or not self.free_slot():
                break
            copies.append(self._store.fetch(page))
            num_tokens += page.filled
        return copies, num_tokens

    def drop_fetchable(self, context: Context) -> None:
        """Drop what could be fetched from the host and what no other context refers to, so that it is recomputed."""
        for page in context.pages:
            if _is_fetchable(page) and page.refs + page.evictable_refs == 1:
                self._store.drop_host(page)

    def copy_out(self, context: Context, pages: range, most: int) -> tuple[list[PageCopy], int]:
        """Copy pages to the host in this order, until one cannot be copied or `most` are.

        A page can be copied if it is dirty, no plan in flight changes it, and `num_host_free` is not 0.

        Returns:
            The copies to make, and the tokens whose KV they move.
        """
        copies, num_tokens = list[PageCopy](), 0
        for index in pages[:most]:
            page = context.pages[index]
            copy = self._store.offload(page)
            if copy is None:
                break
            copies.append(copy)
            num_tokens += page.filled
        return copies, num_tokens

    def drop(self, context: Context, pages: range, *, device: bool, host: bool) -> int:
        """Drop pages from the device, from the host, or from both; returns how many device slots are free now.

        A page in use stays. So does one of several contexts that would be missing then: `evict_paused` takes such pages last.
        """
        freed = 0
        for index in pages:
            page = context.pages[index]
            if page.evictable_refs > 1 and (host or page.host is None):
                continue
            freed += device and self._store.drop_device(page)
            if host and page.host is not None and not page.refs:
                self._store.drop_host(page)
        return freed

    def evict_paused(self, most: int = 1) -> int:
        """Free up to `most` device slots of the pages that were paused first; returns how many."""
        freed = 0
        while freed < most and self._store.evict_paused():
            freed += 1
        return freed

    # -- plans and pools -------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Start a plan: pages that the last one fetched are readable, pages that it copied out can be fetched."""
        self._store.begin()

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._store.dropped)
        self._store.dropped.clear()
        return dropped

    @property
    def num_available(self) -> int:
        """Device slots that `free_slot` can find."""
        return self._store.num_available

    @property
    def num_paused(self) -> int:
        """Device slots of paused contexts, which the policy evicts."""
        return len(self._store.paused)

    @property
    def num_host_free(self) -> int:
        """Host slots that are free or hold a copy on which no paused context depends."""
        return self._store.num_host_free

    @property
    def has_host(self) -> bool:
        """Whether there are host slots at all."""
        return self._store.occupancy().host_total > 0

    def occupancy(self) -> Occupancy:
        """Both pools by kind."""
        return self._store.occupancy()

    def drop_prefixes(self) -> None:
        """Drop every finished prefix, on the device and on the host, since the weights changed or the arrays were lost."""
        self._store.begin()  # copies to the host arrive, so that no page is left out
        self._store.clear()

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, contexts: Sequence[Context]) -> None:
        """Assert that pages, references, slots and digests agree; `contexts` are all open ones."""
        refs: Counter[Page] = Counter()
        evictable_refs: Counter[Page] = Counter()
        for context in contexts:
            (refs if context.held else evictable_refs).update(context.pages)
        self._store.check(refs, evictable_refs)

    def _extend_chain(self, context: Context, tokens: Sequence[int], num_full: int) -> None:
        size = self.page_size
        for index in range(len(context.chain), num_full):
            parent = context.chain[-1] if context.chain else context.root
            context.chain.append(chain_digest(parent, tokens[index * size : (index + 1) * size]))

    def _index(self, context: Context, index: int) -> None:
        """Index a page if it is full, computed, and its tokens are accepted, that is, in the chain."""
        page = context.pages[index]
        if index < len(context.chain) and self.page_size in (page.filled, page.host_filled):
            self._store.index(page, context.chain[index])


def _is_fetchable(page: Page) -> bool:
    return page.device is None and page.host is not None and not page.offloading
