"""The scheduler's interface to pages: the contexts, their references, what can be computed next. Policies decide, not it.

A running context holds references on its pages, a paused one evictable references; where the pages are is the `PageStore`'s.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from secrets import token_bytes
from typing import final

from jinfercept.kv.context import Context, ContextResidency
from jinfercept.kv.page import Page, Residency, chain_digest, root_digest
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
        self.store = PageStore(num_device_pages, num_host_pages, page_size, prefix_caching)
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
            found = self.store.find(context.chain[index])
            if found is None:
                if index >= len(context.pages):
                    break
                continue
            if index < len(context.pages):
                self.store.count(context.pages[index], evictable_refs=-1)
                context.pages[index] = found
            else:
                context.pages.append(found)
            self.store.count(found, evictable_refs=1)
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
            self.store.count(page, refs=1, evictable_refs=-1)
        context.ready = 0
        self.advance(context)

    def release(self, context: Context) -> None:
        """The sequence pauses: turn its references into evictable references. Pages for tokens that did not come are free."""
        self.trim(context)
        context.held = False
        for page in context.pages:
            self.store.count(page, refs=-1, evictable_refs=1)

    def close(self, context: Context) -> None:
        """The sequence is finished: give its references back, children before parents."""
        for page in reversed(context.pages):
            if context.held:
                self.store.count(page, refs=-1)
            else:
                self.store.count(page, evictable_refs=-1)
        context.pages.clear()
        context.held = False

    def forget(self, context: Context) -> None:
        """No other context gets the pages from now on; those that have some of them keep them."""
        for page in context.pages:
            self.store.forget(page)

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
            self.store.count(page, evictable_refs=-1)
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

    def needs_slot(self, context: Context, position: int) -> bool:
        """Whether the token at `position` needs a device slot that its page does not have."""
        index = position // self.page_size
        return index >= len(context.pages) or context.pages[index].device is None

    def give_slot(self, context: Context, position: int) -> None:
        """Give the page of the token at `position` a free device slot. There must be one; earlier pages must exist."""
        index = position // self.page_size
        assert context.held
        if index == len(context.pages):
            page = Page()
            page.refs = 1
            context.pages.append(page)
        self.store.place(context.pages[index])

    def append(self, context: Context) -> bool:
        """Note that the plan computes the token at `ready`; False if that takes more than a count: `computed` does it."""
        index, offset = divmod(context.ready, self.page_size)
        if index >= len(context.pages):
            return False
        page = context.pages[index]
        if page.filled != offset or page.device is None or page.host is not None:
            return False
        page.filled = offset + 1
        context.ready += 1
        if page.filled == self.page_size:
            self.store.fill(page)
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
                    self.store.drop_host(page)
                if filled == size:
                    self.store.fill(page)
                    self._index(context, index)
        if start <= context.ready:
            context.ready = max(context.ready, end)
        self.advance(context)

    def trim(self, context: Context) -> int:
        """Give back the last pages of a held context that have a device slot and no token; returns how many pages are left."""
        assert context.held
        pages = context.pages
        while pages and pages[-1].device is not None and not pages[-1].filled:
            self.store.count(pages.pop(), refs=-1)
        return len(pages)

    # -- moving ----------------------------------------------------------------------------------------------------

    def missing_slots(self, context: Context) -> int:
        """Pages of the context that have no device slot."""
        return sum(page.device is None for page in context.pages)

    def survey(self, context: Context, num_tokens: int) -> ContextResidency:
        """The context's tokens by place.

        Args:
            num_tokens: leading tokens that were ever computed.
        """
        device = sum(page.filled for page in context.pages if page.device is not None)
        host = sum(page.host_filled for page in context.pages if page.device is None)
        return ContextResidency(device, host, max(0, num_tokens - device - host))

    def host_only(self, context: Context) -> Iterator[Page]:
        """The pages that can be fetched now, first token first."""
        return (page for page in context.pages if page.device is None and page.host is not None and not page.offloading)

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, contexts: Sequence[Context]) -> None:
        """Assert that pages, references, slots and digests agree; `contexts` are all open ones."""
        refs: Counter[Page] = Counter()
        evictable_refs: Counter[Page] = Counter()
        for context in contexts:
            (refs if context.held else evictable_refs).update(context.pages)
        self.store.check(refs, evictable_refs)

    def _extend_chain(self, context: Context, tokens: Sequence[int], num_full: int) -> None:
        size = self.page_size
        for index in range(len(context.chain), num_full):
            parent = context.chain[-1] if context.chain else context.root
            context.chain.append(chain_digest(parent, tokens[index * size : (index + 1) * size]))

    def _index(self, context: Context, index: int) -> None:
        """Index a page if it is full, computed, and its tokens are accepted, that is, in the chain."""
        page = context.pages[index]
        if index < len(context.chain) and self.page_size in (page.filled, page.host_filled):
            self.store.index(page, context.chain[index])
