"""The only way to pages: contexts and their references, device slots, copies between the memories.

A caller asks in contexts and counts of pages. A running context holds references on its pages, a paused one evictable
references. A policy's move names pages by a range of their indexes in the context. What is done costs as much as the extents
that it changes, and the pages that it moves, but not as much as a context has pages.
"""

from collections import Counter
from collections.abc import Sequence
from secrets import token_bytes as random_bytes
from typing import final
from weakref import WeakValueDictionary

from jinfercept.kv.context import Context
from jinfercept.kv.copies import ContextCopies
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import Occupancy, Residency, root_digest
from jinfercept.kv.side_pool import SidePool
from jinfercept.kv.states import NO_STATES, StatePool, StateSizes
from jinfercept.kv.store import ExtentStore
from jinfercept.kv.tails import ContextTails
from jinfercept.kv.windows import NO_WINDOWS, WindowPool, WindowSizes


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
        states: of recurrent layers, if the model has some.
        windows: pages of layers with windows, if these have pages of their own.

    Attributes:
        copies: moves pages between the memories.
        side_pool: the pages of layers with windows, or the states of recurrent layers.
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
        states: StateSizes = NO_STATES,
        windows: WindowSizes = NO_WINDOWS,
    ) -> None:
        self.page_size = page_size
        self.most_moved_pages = most_moved_pages
        assert not (windows.window and states.num_states), "a model has windows with pages of their own, or states"
        self.side_pool: SidePool = WindowPool(windows, page_size)
        if states.num_states:
            self.side_pool = StatePool(states, page_size, prefix_caching)
        self._store = ExtentStore(num_device_pages, num_host_pages, page_size, prefix_caching, self.side_pool)
        self._tails = ContextTails(self._store, self.side_pool)
        self.copies = ContextCopies(self._store, self._tails, self.side_pool, prefix_caching)
        self._trees: WeakValueDictionary[bytes, PageExtent] = WeakValueDictionary()
        self._identity = identity

    # -- contexts --------------------------------------------------------------------------------------------------

    def open(self, salt: str = "") -> Context:
        """A new, empty context. Contexts of different `salt` share no pages."""
        return self.open_in(root_digest(self._identity, self.page_size, salt))

    def open_in(self, root: bytes) -> Context:
        """A new, empty context that may share the pages of those with this `root`."""
        return Context(root, self._tree(root), self.page_size, self.side_pool.new(), self.side_pool.slot_cost)

    def _tree(self, root: bytes) -> PageExtent:
        return self._trees.get(root) or self._trees.setdefault(root, PageExtent())

    def refresh(self, context: Context, tokens: Sequence[int]) -> None:
        """Share the pages of other contexts and of finished requests that have the same tokens, missing ones between them too.

        The page that ends with the last token is left out: the logits of that token have to be computed.
        """
        assert not context.held
        self._tails.publish(context)
        self.copies.settle(context)
        self._tails.share(context, tokens)

    def hold(self, context: Context) -> None:
        """The sequence starts to run: turn its evictable references into references."""
        assert not context.held
        self._tails.publish(context)
        if context.tail.num_pages and context.tail.residency is Residency.MISSING:
            self._tails.drop(context)
        self.copies.settle(context)
        context.held = True
        context.tail.refs, context.tail.evictable_refs = 1, 0
        context.tail.changed()
        use = self._store.next_use()
        for extent in context.extents:
            extent.last_use = use
            self._store.count(extent, *((0, 0) if extent is context.tail else (1, -1)))
        context.ready = 0
        self.advance(context)

    def release(self, context: Context) -> None:
        """The sequence pauses: turn its references into evictable references. Pages for tokens that did not come are free."""
        self.trim(context)
        self._tails.give_unfilled_back(context)
        context.held = False
        context.tail.refs, context.tail.evictable_refs = 0, 1
        context.tail.changed()
        use = self._store.next_use()
        for extent in reversed(context.extents):
            extent.last_use = use
            self._store.count(extent, *((0, 0) if extent is context.tail else (-1, 1)))
        self._tails.publish(context)
        if context.tail.num_pages > 1:
            self._tails.shorten(context, 1)
        if context.side is not None:
            self.copies.pause(context)

    def close(self, context: Context) -> None:
        """The sequence is finished: give its references back, children before parents."""
        if context.held:
            self.trim(context)
            self._tails.give_unfilled_back(context)
            context.held = False
            for extent in context.extents:
                if extent is not context.tail:
                    self._store.count(extent, -1, 1)
        self._tails.publish(context)
        if context.side is not None:
            self.copies.end(context)
        self._tails.drop(context)
        use, tree = self._store.next_use(), context.last
        for extent in reversed(context.extents):
            tree = extent.parent
            extent.last_use = use
            extent.contexts.discard(context)
            self._store.count(extent, evictable_refs=-1)
        assert tree is not None
        context.begin(tree)
        context.uncommitted = 0

    def forget(self, context: Context) -> None:
        """No other context gets the pages from now on; those that have some of them keep them."""
        for extent in context.extents[:1]:
            if extent is not context.tail:
                self._store.forget(extent)

    def isolate(self, context: Context) -> None:
        """Forget the pages and give them back: the context is empty, and shares no page from now on."""
        self.forget(context)
        context.root = random_bytes()
        self.renew(context, PageExtent(shareable=False))

    def renew(self, context: Context, tree: PageExtent | None = None) -> None:
        """Give the pages back: the context is empty, as a new one. See `drop_prefixes`."""
        self.close(context)
        context.shared, context.ready, context.num_stored = False, 0, 0
        context.begin(tree or self._tree(context.root))

    def cut(self, context: Context, num_tokens: int) -> None:
        """Shorten a context to the pages whose tokens are all among the first `num_tokens`, and give the others back."""
        assert not context.held
        self._tails.publish(context)
        tail = context.tail
        if tail.start * self.page_size + max(tail.filled, tail.host_filled) > num_tokens:
            self._tails.keep(context, num_tokens // self.page_size)
        if context.side is not None:
            self.side_pool.cut(context, context.num_pages)
        self.copies.settle(context)

    def commit(self, context: Context, tokens: Sequence[int]) -> None:
        """Let other contexts share the pages that are full, computed and accepted.

        Args:
            tokens: every accepted token of the sequence.
        """
        if len(tokens) < context.uncommitted:  # almost always
            return
        self._tails.commit(context, tokens)

    def mark(self, context: Context, remaining_tokens: int) -> None:
        """Let other contexts go on behind the full pages of a running one, if layers have windows or states: see
        `ContextCopies.mark`."""
        if context.side is not None:
            self.copies.mark(context, remaining_tokens)

    # -- computing -------------------------------------------------------------------------------------------------

    def advance(self, context: Context) -> None:
        """Move `ready` forward over the pages that are readable now."""
        size, ready = self.page_size, context.ready
        for extent in context.extents_from(ready // size):
            end = extent.start * size + extent.filled
            if extent.device is None or extent.fetching or end <= ready:
                break
            ready = end
            if extent.filled < extent.num_pages * size:
                break
        context.ready = ready if self.side_pool.is_there(context) else 0

    def gap_end(self, context: Context, limit: int) -> int:
        """End of the tokens to compute from `ready` on: the next page on the device or the host, or `limit`.

        Args:
            limit: tokens of the sequence.
        """
        size, index = self.page_size, context.ready // self.page_size
        if not self.side_pool.is_there(context):
            return context.ready
        for extent in context.extents_from(index):
            if extent.device is None and extent.host is None:
                continue
            if extent.start > index:
                return min(limit, extent.start * size)
            if extent.fetching or extent.device is None:
                return context.ready
        return limit

    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        """Where a chunk of a sequence with so many tokens ends that starts at one and may reach up to another."""
        return end if context.side is None else self.side_pool.chunk_end(context, start, end, length)

    def step_back(self, context: Context, length: int) -> None:
        """Shorten a context that does not run where it cannot compute the last of so many tokens again, as a state cannot."""
        if context.side is not None and self.side_pool.has_seen(context, length):
            self.cut(context, length - 1)

    def fetches(self, context: Context, position: int) -> bool:
        """Whether the plan being built fetches the page of a token: only tokens that the host has of it may be computed."""
        index = position // self.page_size
        return any(extent.fetching for extent, _, _ in context.parts(index, index + 1))

    def slots_needed(self, context: Context, num_tokens: int) -> int:
        """Device slots that the context lacks for so many tokens."""
        num_pages = (num_tokens - 1) // self.page_size + 1
        lacking = sum([extent.num_pages for extent in context.extents if extent.device is None])
        return lacking + max(0, num_pages - context.num_pages)

    def pages_between(self, start: int, end: int) -> int:
        """Pages of the tokens `start … end - 1`."""
        return (end - 1) // self.page_size - start // self.page_size + 1

    def free_slot(self, context: Context, position: int) -> bool:
        """Whether a device slot is free for a context, and slots for its window if it lacks some; if none is, the least
        recently used page of finished prefixes gives up its own.

        Args:
            position: of the first token that is to be computed and has no page.
        """
        if self._store.num_free <= 0 and self._store.evict_cached(1) <= 0:
            return False
        return context.side is None or self.side_pool.find_for(context, position)

    def place(self, context: Context, start: int, end: int) -> int:
        """Give the pages of the tokens `start … end - 1` of a held context device slots that are free or of finished prefixes.

        Returns:
            `end`, or the first of the tokens whose page has no slot.
        """
        assert context.held
        if start >= end:
            return end
        size = self.page_size
        if context.side is not None:
            end = min(end, self.side_pool.extend(context, (end - 1) // size + 1) * size)
            if end <= start:
                return start
        placed = self._tails.place(context, start // size, (end - 1) // size + 1)
        return max(start, min(end, placed * size))

    def append(self, context: Context, num_placed: int) -> bool:
        """Note that the plan computes the token at `ready`; False if that takes more than a count: `computed` does it.

        Args:
            num_placed: leading pages whose slots the runner knows.
        """
        tail, size = context.tail, self.page_size
        filled = tail.filled
        if (
            context.ready != tail.start * size + filled
            or num_placed < tail.start + tail.num_pages
            or filled >= tail.num_pages * size
            or tail.host is not None
            or tail.device is None
            or (context.side is not None and not context.side.append(context.ready // size))
        ):
            return False
        tail.filled = filled + 1
        context.ready += 1
        context.forget_runs()
        if tail.filled % size == 0:
            self._store.freshen(tail, tail.start + filled // size)
        return True

    def computed(self, context: Context, start: int, end: int) -> None:
        """Note that the plan computes the tokens `start … end - 1`, and drop host copies that are now too short."""
        size = self.page_size
        if context.side is not None:
            self.side_pool.computed(context, start, end)
        for extent, _, stop in context.parts(start // size, (end - 1) // size + 1):
            assert extent.device is not None
            first = extent.start * size
            filled, before = min(end, stop * size) - first, extent.filled
            assert start <= first + before, "a hole within an extent"
            if filled > before:
                extent.filled = filled
                extent.changed()
                if extent.host is not None:
                    self._store.drop_host(extent)
                if filled // size > before // size:
                    self._store.freshen(extent, extent.start + before // size)
        if start <= context.ready:
            context.ready = max(context.ready, end)
        self.advance(context)

    def trim(self, context: Context) -> int:
        """Give back the last pages of a held context that have a device slot and no token; returns how many pages are left."""
        assert context.held
        tail = context.tail
        num_filled = -(-tail.filled // self.page_size)
        if tail.device is not None and num_filled < tail.num_pages:
            self._tails.shorten(context, num_filled)
            if context.side is not None:
                self.side_pool.cut(context, context.num_pages)
        return context.num_pages

    # -- plans and pools -------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Start a plan: pages that the last one fetched are readable, pages that it copied out can be fetched."""
        self._store.begin()
        if self.side_pool.is_used:
            self.side_pool.begin()

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._store.dropped)
        del self._store.dropped[:]
        return dropped

    @property
    def num_available(self) -> int:
        """Device slots that are free or hold a finished prefix."""
        return self._store.num_available

    @property
    def num_paused(self) -> int:
        """Device slots of paused contexts, which the policy evicts."""
        return self._store.queues.paused.num_pages

    @property
    def num_host_free(self) -> int:
        """Host slots that are free or hold a copy on which no paused context depends."""
        return self._store.num_host_free

    @property
    def has_host(self) -> bool:
        """Whether there are host slots at all."""
        return self._store.num_host > 0

    def occupancy(self) -> Occupancy:
        """Both pools by kind."""
        return self._store.occupancy()

    def drop_prefixes(self, *, apart: bool = False) -> None:
        """Drop every finished prefix, on the device and on the host, since the weights changed or the arrays were lost.
        `apart`: contexts that are opened or renewed from now on share no page of those that are not."""
        self.begin_plan()  # copies to the host arrive, so that no page is left out
        if apart:
            self._trees.clear()
        self._store.clear()
        self.side_pool.checkpoints.clear()

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, contexts: Sequence[Context]) -> None:
        """Assert that extents, references and slots agree; `contexts` are all open ones."""
        refs: Counter[PageExtent] = Counter()
        evictable_refs: Counter[PageExtent] = Counter()
        for context in contexts:
            (refs if context.held else evictable_refs).update(context.extents)
            assert all(context in extent.contexts for extent in context.extents), "an extent does not know its context"
            assert context.tail.start == context.last.end, "the tail is not behind the last extent"
            assert context.held or context.tail.num_pages <= 1, "the tail of a paused context"
            assert not context.tail.children
        self._store.check(refs, evictable_refs)
        self.side_pool.check(contexts)
