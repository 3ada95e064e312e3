"""The only way to pages: contexts and their references, device slots, copies between the memories.

A running context holds references on its pages, a paused one evictable references. An operation costs time in proportion to the
extents that it changes and the pages that it moves, not to the pages of a context.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from secrets import token_bytes as random_bytes
from typing import Any, final
from weakref import WeakValueDictionary

from jinfercept.kv.context import Context, ContextState, bounds
from jinfercept.kv.extent import PageExtent, token_bytes
from jinfercept.kv.page import Occupancy, PageCopies, Residency, root_digest
from jinfercept.kv.side_pool import NO_SIDES, SidePool, SideSizes
from jinfercept.kv.states import StatePool
from jinfercept.kv.store import ExtentStore
from jinfercept.kv.windows import WindowPool


@final
class KVManager:
    """Contexts of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        identity: of the model and the dtype, which KV depends on besides the tokens; different identities share no pages.
        prefix_caching: keep full pages of finished requests until their slots are needed.
        most_moved_pages: pages that one plan may move over the host link, both ways together; None: any number.
        sides: sizes of the pool for states of recurrent layers, or for pages of layers with windows.
        turn_ends: tokens that end a turn of a conversation: clients cut their prompts behind these.
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
        sides: SideSizes = NO_SIDES,
        turn_ends: Collection[int] = (),
    ) -> None:
        self.page_size = page_size
        self.most_moved_pages = most_moved_pages
        self.side_pool: SidePool[Any] | None = None  # None if the model has neither windows nor states
        if sides.num_slots:
            pool = WindowPool if sides.window else StatePool
            self.side_pool = pool(sides, page_size, prefix_caching, turn_ends)
        forget = self.side_pool and self.side_pool.forget_checkpoints
        self._store = ExtentStore(num_device_pages, num_host_pages, page_size, prefix_caching, forget)
        self._trees: WeakValueDictionary[bytes, PageExtent] = WeakValueDictionary()
        self._identity = identity

    # -- contexts --------------------------------------------------------------------------------------------------

    def open(self, salt: str = "") -> Context:
        """A new, empty context. Contexts of different `salt` share no pages."""
        return self.open_in(root_digest(self._identity, self.page_size, salt))

    def open_in(self, root: bytes) -> Context:
        """A new, empty context that may share the pages of those with this `root`."""
        context = Context(root, self._tree(root), self._store)
        if self.side_pool:
            context.side, context.side_cost = self.side_pool.new(), self.side_pool.slot_cost
        return context

    def _tree(self, root: bytes) -> PageExtent:
        return self._trees.get(root) or self._trees.setdefault(root, PageExtent())

    def refresh(self, context: Context, tokens: Sequence[int]) -> None:
        """Share pages that other contexts or finished requests have for the same tokens, missing ones between them too."""
        assert not context.in_use
        context.publish()
        if self.side_pool:
            self.side_pool.settle(context)
        # without the page that ends with the last token: the logits of that token have to be computed
        alike, present = context.following(tokens)
        if self.side_pool:
            present = self.side_pool.share(context, alike, tokens)
        if present:
            context.drop_tail()
            for extent, num_pages in alike[:present]:
                context.enter(self._store.part(extent, extent.start, extent.start + num_pages))
            context.shared, context.tail.start = True, context.last.end
            if self.side_pool:
                self.side_pool.go_on(context, context.last, context.last.end)

    def hold(self, context: Context) -> None:
        """Turn a context's evictable references into references: its sequence starts to run."""
        assert not context.in_use
        context.publish()
        if context.tail.num_pages and context.tail.residency is Residency.MISSING:
            context.drop_tail()
        if self.side_pool:
            self.side_pool.settle(context)
        self._pin(context, in_use=True)
        context.ready = 0
        self.advance(context)

    def release(self, context: Context) -> None:
        """Turn references into evictable references: the sequence pauses. Pages for tokens that did not come are free."""
        self.trim(context)
        context.give_unfilled_back()
        self._pin(context, in_use=False)
        context.publish()
        if context.tail.num_pages > 1:
            context.shorten_tail(1)
        if self.side_pool:
            self.side_pool.pause(context)

    def _pin(self, context: Context, *, in_use: bool) -> None:
        tail, use, change = context.tail, self._store.next_use(), 1 if in_use else -1
        context.in_use, tail.refs, tail.evictable_refs = in_use, int(in_use), int(not in_use)
        tail.changed()
        for extent in context.extents:
            extent.last_use = use
            self._store.count(extent, *((0, 0) if extent is tail else (change, -change)))

    def close(self, context: Context) -> None:
        """Give the references of a finished sequence back, children before parents."""
        if context.in_use:
            self.trim(context)
            context.give_unfilled_back()
            self._pin(context, in_use=False)
        context.publish()
        if self.side_pool:
            self.side_pool.end(context)
        context.drop_tail()
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
        """Let no other context get the pages from now on. Contexts that have some of them keep them."""
        for extent in context.extents[:1]:
            if extent is not context.tail:
                self._store.forget(extent)

    def isolate(self, context: Context) -> None:
        """Forget the pages and give them back. The context is empty, and shares no page from now on."""
        self.forget(context)
        context.root = random_bytes()
        self.renew(context, PageExtent(shareable=False))

    def renew(self, context: Context, tree: PageExtent | None = None) -> None:
        """Give the pages back: the context is empty, as a new one. See `drop_prefixes`."""
        self.close(context)
        context.shared, context.ready, context.num_stored = False, 0, 0
        context.begin(tree or self._tree(context.root))

    def cut(self, context: Context, num_tokens: int) -> None:
        """Shorten a context to the pages whose tokens are all among the first `num_tokens`."""
        assert not context.in_use
        context.publish()
        tail = context.tail
        if tail.start * self.page_size + max(tail.filled, tail.host_filled) > num_tokens:
            context.keep(num_tokens // self.page_size)
        if self.side_pool:
            self.side_pool.cut(context, context.num_pages)
            self.side_pool.settle(context)

    def commit(self, context: Context, tokens: Sequence[int]) -> None:
        """Let other contexts share the pages that are full and computed, and whose tokens are among the accepted `tokens`."""
        tail, size = context.tail, self.page_size
        first = tail.start + len(tail.tokens) // self._store.page_bytes
        num_full = min(len(tokens) // size, tail.start + max(tail.filled, tail.host_filled) // size)
        if first < num_full:
            tail.tokens += token_bytes(tokens[first * size : num_full * size])
            context.publish()
        context.uncommitted = (max(first, num_full) + 1) * size

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
        context.ready = ready if self.is_there(context) else 0

    def is_there(self, context: Context) -> bool:
        """Whether a context's window or state can be read now; true without these."""
        return not self.side_pool or self.side_pool.is_there(context)

    def gap_end(self, context: Context, limit: int) -> int:
        """End of the tokens to compute from `ready` on: the next page on the device or the host, or `limit`."""
        size, index = self.page_size, context.ready // self.page_size
        if not self.is_there(context):
            return context.ready
        for extent in context.extents_from(index):
            if extent.device is None and extent.host is None:
                continue
            if extent.start > index:
                return min(limit, extent.start * size)
            if extent.fetching or extent.device is None:
                return context.ready
        return limit

    def step_back(self, context: Context, length: int) -> None:
        """Shorten a context that does not run if it has a state, which cannot compute the last of `length` tokens again."""
        if self.has_seen(context, length):
            self.cut(context, length - 1)

    def has_seen(self, context: Context, length: int) -> bool:
        """Whether a context cannot compute the last of `length` tokens again."""
        return self.side_pool is not None and self.side_pool.has_seen(context, length)

    def takes_drafts(self, context: Context, position: int) -> bool:
        """Whether the plan being built may compute drafts behind a chunk, which begins at a position."""
        index, side = position // self.page_size, context.side
        # the state behind the chunk is a checkpoint now: the runner would get another slot for the drafts
        if isinstance(side, ContextState) and not side.slot:
            return False
        # a page that is fetched is written behind the compute, over the drafts
        return not any(extent.fetching for extent, _, _ in context.parts(index, index + 1))

    def slots_needed(self, context: Context, num_tokens: int) -> int:
        """Number of device slots that the context lacks for `num_tokens` tokens."""
        num_pages = (num_tokens - 1) // self.page_size + 1
        lacking = sum([extent.num_pages for extent in context.extents if extent.device is None])
        return lacking + max(0, num_pages - context.num_pages)

    def pages_between(self, start: int, end: int) -> int:
        """Number of pages of the tokens `start … end - 1`."""
        return (end - 1) // self.page_size - start // self.page_size + 1

    def free_slot(self, context: Context, position: int) -> bool:
        """Whether device slots are free for the page at `position`, the first token without one, and for the context's side.

        If no page's slot is free, the least recently used page of finished prefixes loses its own.
        """
        if self._store.device.num_free <= 0 and self._store.evict(self._store.cached, 1) <= 0:
            return False
        return not self.side_pool or self.side_pool.find_for(context, position)

    def place(self, context: Context, start: int, end: int, *, drafts: bool = False) -> int:
        """Give pages of the tokens `start … end - 1` of a held context device slots that are free or of finished prefixes.

        Returns `end`, or the first token whose page has no slot. A state does not see tokens that are `drafts`.
        """
        assert context.in_use
        if start >= end:
            return end
        size = self.page_size
        if self.side_pool and not (drafts and self.has_states):
            end = min(end, self.side_pool.extend(context, (end - 1) // size + 1) * size)
            if end <= start:
                return start
        store, first, last = self._store, start // size, (end - 1) // size + 1
        for extent, begin, behind in context.parts(first, last) if first < context.num_pages else ():
            if extent.device is None:
                slots = store.take(behind - begin)
                if slots:
                    store.place(store.part(extent, begin, begin + len(slots)), slots)
                if len(slots) < behind - begin:
                    return max(start, (begin + len(slots)) * size)
        lacking, tail = last - context.num_pages, context.tail
        if lacking > 0 and (slots := store.take(lacking)):
            assert tail.device is not None or not tail.num_pages
            if tail.host is not None:
                store.drop_host(tail)  # it is too short as soon as the tail grows
            if tail.device is None:
                tail.device = slots
            else:
                tail.device.extend(slots)
            tail.num_pages += len(slots)
            tail.changed()
            context.forget_extents()
        return max(start, min(end, context.num_pages * size))

    def append(self, context: Context, num_placed: int) -> bool:
        """Note that the plan computes the token at `ready`. False if that takes more than a count: then `computed` does it.

        The runner knows the slots of the first `num_placed` pages.
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
        if self.side_pool:
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
        """Give back the last pages of a held context that have a device slot and no token; returns the number of pages left."""
        assert context.in_use
        tail = context.tail
        num_filled = -(-tail.filled // self.page_size)
        if tail.device is not None and num_filled < tail.num_pages:
            context.shorten_tail(num_filled)
            if self.side_pool:
                self.side_pool.cut(context, context.num_pages)
        return context.num_pages

    # -- moving ----------------------------------------------------------------------------------------------------
    # Pages are named by a range of their indexes in the context, whose order is that of the copies.

    def num_fetchable(self, context: Context) -> int:
        """Number of pages of the context that can be fetched from the host now. Its window counts as one."""
        pages = sum([extent.num_pages for extent in context.extents if extent.is_fetchable])
        if self.side_pool:
            pages += self.side_pool.is_fetchable(context)
        return pages

    def fetch(self, context: Context, most: int, pages: range | None = None) -> tuple[PageCopies, int]:
        """Fetch up to `most` pages of a context to slots that are free or of finished prefixes.

        `pages` are consecutive indexes, in the order of the copies; None: all, first token first. The pages are readable from
        the next plan on. Returns the copies, and the tokens whose KV they move.
        """
        copies, num_tokens = PageCopies(), 0
        if pages is None:
            pages = range(context.num_pages)
        for extent, start, end in _within(context, pages):
            if extent.is_fetchable:
                slots = self._store.take(min(end - start, most - len(copies)))
                if not slots:
                    break
                if pages.step > 0:
                    end = start + len(slots)
                part = self._store.part(extent, end - len(slots), end)
                num_tokens += part.host_filled
                self._store.fetch(part, slots)
                assert part.host is not None
                copies.add(slots[:: pages.step], part.host[:: pages.step])
        return copies, num_tokens

    def copy_out(self, context: Context, pages: range, most: int) -> tuple[PageCopies, int]:
        """Copy pages to the host in this order, until one cannot be copied or `most` are.

        A page can be copied if it is dirty, no plan in flight changes it, and `num_host_free` is not 0. Returns the copies, and
        the tokens whose KV they move.
        """
        store, copies, num_tokens = self._store, PageCopies(), 0
        for extent, start, end in _within(context, pages):
            last, num_pages = store.offloadable(extent), end - start
            room = min(num_pages, most - len(copies), store.num_host_free)
            if pages.step > 0:
                end = min(last, start + room)
            else:
                start = end - room if end <= last else end
            if start >= end:
                break
            part = store.part(extent, start, end)
            num_tokens += part.filled
            store.offload(part)
            assert part.device is not None
            assert part.host is not None
            copies.add(part.device[:: pages.step], part.host[:: pages.step])
            if end - start < num_pages:
                break
        return copies, num_tokens

    def drop(self, context: Context, pages: range, *, device: bool, host: bool) -> int:
        """Drop pages from the device, from the host, or from both; returns the number of device slots that are free now.

        A page in use stays. So does one of several contexts that would be missing then: `evict_paused` takes such pages last. A
        context with a window or a state loses all that it alone has.
        """
        if self.side_pool and not context.in_use:
            if self._loses(context, pages, device=device, host=host):
                return self.side_pool.lose(context)
            if device and context.num_pages - 1 in pages:
                self.side_pool.drop_device(context)
        freed = 0
        for extent, start, end in _within(context, pages):
            if extent.evictable_refs > 1 and (host or extent.host is None):
                continue
            drops_device = device and extent.is_evictable
            drops_host = host and extent.host is not None and not extent.refs
            is_end = extent.start < start < end == extent.end
            if is_end and drops_device and not drops_host and self._store.recede(extent, start):
                freed += end - start
            elif drops_device or drops_host:
                part = self._store.part(extent, start, end)
                freed += self._store.drop_device(part) if drops_device else 0
                if drops_host:
                    self._store.drop_host(part)
        return freed

    @staticmethod
    def _loses(context: Context, pages: range, *, device: bool, host: bool) -> bool:
        for extent, _, _ in context.parts(*bounds(pages)):
            if extent.num_contexts > 1 or extent.residency is Residency.MISSING:
                continue
            stays_on_device = extent.device is not None and not (device and extent.is_evictable)
            if not stays_on_device and (host or extent.host is None):
                return True
        return False

    def leave_device(self) -> None:
        # No context runs, and no copy is in flight; pages without a host copy are missing afterwards.
        for extent in [*self._store.paused, *self._store.cached]:
            if extent.num_pages:
                self._store.drop_device(extent)

    def evict_paused(self, most: int = 1) -> int:
        """Free up to `most` device slots of the pages that were paused first; returns their number."""
        if not self.side_pool:
            return self._store.evict(self._store.paused, most)
        # a context with a window or a state goes as a whole
        freed, paused = 0, self._store.paused
        while freed < most and (extent := next((first for first in paused if not first.fetching), None)) is not None:
            if extent.residency is Residency.CLEAN:
                freed += self._store.drop_device(extent)
                continue
            freed += sum([self.side_pool.lose(context) for context in list(extent.contexts)])
            freed += self._store.drop_device(extent)
        return freed

    def evict_side(self, running: Context | None, position: int) -> int:
        """Lose a paused context if a running one lacks slots for its window or state at a position (see `SidePool.find_for`).

        Returns the device slots of pages that are free now, and at least 1 if there was a paused context.
        """
        pool = self.side_pool
        if pool is None or running is None or pool.find_for(running, position) or (paused := pool.first_paused) is None:
            return 0
        return max(1, pool.lose(paused))

    def adopt(self, context: Context, tokens: Sequence[int], num_pages: int) -> list[int | None]:
        """Lengthen a context that does not run by `num_pages` full pages that come to the host from elsewhere. It has no tail.

        Returns the host slot of each new page, or None for a page that another context has and that is shared instead. The list
        is shorter if the host has no more room. The runner forgets the slots of `take_dropped` before it gets the copies.
        """
        assert not context.in_use
        assert not context.tail.num_pages
        if self.side_pool:
            self.side_pool.free(context)
        store, slots, first, size = self._store, list[int | None](), context.num_pages, self.page_size
        rest = token_bytes(tokens[first * size : (first + num_pages) * size])
        while rest:
            nothing = None, len(rest) // store.page_bytes
            twin, most = next(context.last.matches(rest, store.page_bytes), nothing)
            host_slots = None
            if twin is None or twin.residency is Residency.MISSING:
                host_slots = store.take_host(most)
                twin, _ = next(context.last.matches(rest, store.page_bytes), nothing)  # to free slots may have cut it
                if not host_slots:
                    break
                most = len(host_slots)
            if twin is None:
                twin = PageExtent(start=context.last.end, shareable=context.last.shareable)
                twin.num_pages, twin.last_use = most, store.next_use()
                twin.tokens += rest[: most * store.page_bytes]
                context.last.add_child(twin, store.page_bytes)
            elif most < twin.num_pages:
                twin = store.part(twin, twin.start, twin.start + most)
            context.enter(twin)
            if host_slots is None:
                context.shared = True
            else:
                store.adopt(twin, host_slots)
            slots += [None] * most if host_slots is None else host_slots
            rest = rest[most * store.page_bytes :]
            context.tail.start = context.last.end
        return slots

    def host_slots(self, context: Context, first: int, most: int) -> list[int]:
        """The host slots of consecutive full pages from number `first` on, as long as each has a copy that has arrived."""
        slots: list[int] = []
        for extent in context.extents:
            if extent is context.tail or len(slots) == most:
                break
            if extent.end <= first:
                continue
            if extent.host is None or extent.offloading:
                break
            slots += extent.host[max(0, first - extent.start) :][: most - len(slots)]
        return slots

    # -- plans and pools -------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Start a plan: pages that the last one fetched are readable, pages that it copied out can be fetched."""
        self._store.begin()
        if self.side_pool:
            self.side_pool.begin()

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        return self._store.host.take_dropped()

    def take_dropped_sides(self) -> tuple[int, ...]:
        """As `take_dropped`, for windows and states."""
        return self.side_pool.take_dropped() if self.side_pool else ()

    @property
    def num_available(self) -> int:
        """Number of device slots that are free or hold a finished prefix."""
        return self._store.device.num_free + self._store.cached.num_pages

    @property
    def num_paused(self) -> int:
        """Number of device slots of paused contexts, which the policy evicts."""
        return self._store.paused.num_pages

    @property
    def num_paused_clean(self) -> int:
        return sum([extent.num_pages for extent in self._store.paused if extent.host is not None])  # with a host copy

    @property
    def num_host_free(self) -> int:
        """Number of host slots that are free or hold a copy on which no paused context depends."""
        return self._store.num_host_free

    @property
    def has_states(self) -> bool:
        return self.side_pool is not None and self.side_pool.has_states

    @property
    def has_host(self) -> bool:
        return self._store.host.size > 0

    def occupancy(self) -> Occupancy:
        return self._store.occupancy()

    def drop_prefixes(self, *, apart: bool = False) -> None:
        """Drop every finished prefix, since the weights changed or the arrays were lost.

        `apart`: contexts that are opened or renewed from now on share no page with older ones.
        """
        self.begin_plan()  # copies to the host arrive, so that no page is left out
        if apart:
            self._trees.clear()
        self._store.clear()
        if self.side_pool:
            self.side_pool.forget_checkpoints()

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, contexts: Sequence[Context]) -> None:
        """Assert that extents, references and slots agree; `contexts` are all open ones."""
        refs: Counter[PageExtent] = Counter()
        evictable_refs: Counter[PageExtent] = Counter()
        for context in contexts:
            (refs if context.in_use else evictable_refs).update(context.extents)
            assert all(context in extent.contexts for extent in context.extents), "an extent does not know its context"
            assert context.tail.start == context.last.end, "the tail is not behind the last extent"
            assert context.in_use or context.tail.num_pages <= 1, "the tail of a paused context"
            assert not context.tail.children
        self._store.check(refs, evictable_refs)
        if self.side_pool:
            self.side_pool.check(contexts)


def _within(context: Context, pages: range) -> Iterator[tuple[PageExtent, int, int]]:
    first, last = bounds(pages)
    parts = context.parts(first, last)
    for extent, _, _ in parts if pages.step > 0 else reversed(parts):
        start, end = max(first, extent.start), min(last, extent.end)  # to free slots for one may have cut another
        if start < end:
            yield extent, start, end
