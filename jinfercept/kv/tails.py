"""The tails of contexts: how their pages enter the tree of extents, where contexts share them, and how they are given back."""

from collections.abc import Sequence
from typing import final

from jinfercept.kv.context import Context
from jinfercept.kv.extent import NEVER, PageExtent, common_pages, token_bytes
from jinfercept.kv.page import Residency
from jinfercept.kv.side_pool import SidePool
from jinfercept.kv.store import ExtentStore


@final
class ContextTails:
    """Moves pages between the tails of contexts and the tree."""

    def __init__(self, store: ExtentStore, side_pool: SidePool) -> None:
        self._store, self._page_size, self._side_pool = store, store.page_size, side_pool

    def enter(self, context: Context, extent: PageExtent) -> None:
        """The context has the pages of an extent behind its last one, too."""
        extent.contexts.add(context)
        self._store.count(extent, int(context.held), int(not context.held))
        context.last = extent
        context.forget_extents()

    def drop(self, context: Context) -> None:
        """Give the pages of the tail back."""
        tail = context.tail
        tail.refs = tail.evictable_refs = 0
        self._store.update(tail)
        context.begin(context.last)
        context.uncommitted = 0

    def shorten(self, context: Context, num_pages: int) -> None:
        """Give the last pages of a tail back, which have no host copy."""
        tail = context.tail
        assert tail.device is not None
        self._store.give(tail.device[num_pages:])
        del tail.device[num_pages:]
        tail.num_pages, tail.filled = num_pages, min(tail.filled, num_pages * self._page_size)
        if not num_pages:
            tail.device = None
        self._store.update(tail)
        context.forget_extents()

    def give_unfilled_back(self, context: Context) -> None:
        """Give the slots back that the context was about to fill alone, with the tokens of a page that is not full."""
        for extent in context.extents:
            if extent is context.tail or extent.device is None or extent.refs > 1:
                continue
            num_filled = extent.filled // self._page_size
            if num_filled < extent.num_pages:
                rest = self._store.part(extent, extent.start + num_filled, extent.end)
                assert rest.device is not None
                self._store.give(rest.device)
                rest.device, rest.filled = None, 0
                self._store.changed(rest)
                self._store.update(rest)

    def keep(self, context: Context, num_pages: int) -> None:
        """Shorten a context that does not run to its first pages, and drop its tail."""
        self.drop(context)
        while (extent := context.last).end > num_pages:
            if extent.start < num_pages:
                self._store.part(extent, num_pages, extent.end)
            assert extent.parent is not None
            context.last = extent.parent
            context.forget_extents()
            extent.contexts.discard(context)
            self._store.count(extent, evictable_refs=-1)
            self._store.changed(context.last)
        context.tail.start = context.last.end
        context.uncommitted = 0
        context.num_stored = min(context.num_stored, num_pages)

    def place(self, context: Context, first: int, last: int) -> int:
        """Give the pages `first … last - 1` of a context that runs device slots; returns the first one without, or `last`."""
        store = self._store
        if first < context.num_pages:
            for extent, begin, end in context.parts(first, last):
                if extent.device is None:
                    slots = store.take(end - begin)
                    if slots:
                        store.place(store.part(extent, begin, begin + len(slots)), slots)
                    if len(slots) < end - begin:
                        return begin + len(slots)
        lacking = last - context.num_pages
        if lacking <= 0:
            return last
        tail, slots = context.tail, store.take(lacking)
        if slots:
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
        return context.num_pages

    def commit(self, context: Context, tokens: Sequence[int]) -> None:
        """Publish the pages that are full, computed and accepted; see `KVManager.commit`."""
        tail, size = context.tail, self._page_size
        first = tail.start + len(tail.tokens) // self._store.page_bytes
        num_full = min(len(tokens) // size, tail.start + max(tail.filled, tail.host_filled) // size)
        if first < num_full:
            tail.tokens += token_bytes(tokens[first * size : num_full * size])
            self.publish(context)
        context.uncommitted = (max(first, num_full) + 1) * size

    def publish(self, context: Context) -> None:
        """Put the leading pages of the tail into the tree that are full, computed and accepted.

        Where the tree has such pages, a context that does not run has these instead of its own. One that runs keeps its own
        until it pauses, since the runner knows their slots.
        """
        store, tail = self._store, context.tail
        while tail.tokens and not tail.fetching and not tail.offloading:
            twin = context.last.children.get(tail.key(store.page_bytes))
            if twin is None:
                self._plant(context, len(tail.tokens) // store.page_bytes)
                return
            if context.held and twin.device is not None:
                return
            num_pages = common_pages(twin.tokens, bytes(tail.tokens), 0, store.page_bytes)
            twin, own = store.part(twin, twin.start, twin.start + num_pages), self._split(context, num_pages)
            self.enter(context, twin)
            context.shared = True
            if twin.device is None and own.device is not None:
                store.place(twin, own.device)
                twin.filled, own.device = num_pages * self._page_size, None
                if own.fresh != NEVER:
                    store.freshen(twin, own.fresh)
            if twin.host is None and own.host is not None:
                twin.host, twin.host_filled, own.host = own.host, own.host_filled, None
                store.update(twin)
            store.update(own)

    def _split(self, context: Context, num_pages: int) -> PageExtent:
        """The first pages of the tail, without references; the tail has the others."""
        tail, size, page_bytes = context.tail, num_pages * self._page_size, num_pages * self._store.page_bytes
        own = PageExtent(start=tail.start)
        own.num_pages, own.tokens = num_pages, tail.tokens[:page_bytes]
        del tail.tokens[:page_bytes]
        if tail.device is not None:
            own.device, own.filled = tail.device[:num_pages], size
            del tail.device[:num_pages]
            tail.filled -= size
        if tail.host is not None:
            own.host, own.host_filled = tail.host[:num_pages], size
            del tail.host[:num_pages]
            tail.host_filled -= size
        own.fresh = tail.fresh if tail.fresh < tail.start + num_pages else NEVER
        tail.start += num_pages
        tail.num_pages -= num_pages
        if not tail.num_pages:
            tail.device = tail.host = None
        self._store.update(tail)
        context.forget_extents()
        return own

    def _plant(self, context: Context, num_pages: int) -> None:
        """Put so many pages of the tail into the tree, where no other context has such pages."""
        store, last, own = self._store, context.last, self._split(context, num_pages)
        own.shareable = last.shareable
        fresh = own.fresh
        extends = (
            last.parent is not None
            and not last.children
            and last.num_contexts == 1
            and last.residency is own.residency is Residency.DIRTY
            and not last.fetching
            and last.filled == last.num_pages * self._page_size
        )
        if extends and last.device is not None and own.device is not None:
            last.tokens += own.tokens
            last.device.extend(own.device)
            last.num_pages += num_pages
            last.filled += own.filled
            if fresh != NEVER:
                store.freshen(last, fresh)
            store.update(last)
            return
        last.add_child(own, store.page_bytes)
        own.last_use = max(last.last_use, context.tail.last_use)
        if fresh != NEVER:
            store.freshen(own, fresh)
        self.enter(context, own)
        store.changed(own)

    def share(self, context: Context, tokens: Sequence[int]) -> None:
        """See `KVManager.refresh`; the tail is published."""
        if context.side is not None:
            context.side.branch = 0
        size, page_bytes = self._page_size, self._store.page_bytes
        start, num_full = context.tail.start, (len(tokens) - 1) // self._page_size
        children = context.last.children
        if num_full <= start or token_bytes(tokens[start * size : (start + 1) * size]) not in children:
            return
        own_bytes = token_bytes(tokens[start * size : num_full * size])
        last, offset, present, alike = context.last, 0, 0, list[tuple[PageExtent, int]]()
        while (child := last.children.get(own_bytes[offset : offset + page_bytes])) is not None:
            num_pages = common_pages(child.tokens, own_bytes, offset, page_bytes)
            alike.append((child, num_pages))
            if child.residency is not Residency.MISSING:
                present = len(alike)
            last, offset = child, offset + num_pages * page_bytes
            if num_pages < child.num_pages:
                break
        if context.side is not None:
            alike, present = self._up_to_checkpoint(context, alike)
        if present:
            self.drop(context)
        for extent, num_pages in alike[:present]:
            self.enter(context, self._store.part(extent, extent.start, extent.start + num_pages))
            context.shared = True
        context.tail.start = context.last.end
        if context.side is not None and present:
            self._side_pool.go_on(context, context.last, context.last.end)

    def _up_to_checkpoint(
        self, context: Context, alike: list[tuple[PageExtent, int]]
    ) -> tuple[list[tuple[PageExtent, int]], int]:
        """The extents that follow a context's last one, with the number of their pages that are alike, as far as the context
        can go on behind them; and their number. Notes where others go on with the same pages and have no checkpoint."""
        assert context.side is not None
        last, index = self.last_checkpoint([extent for extent, _ in alike], sum([pages for _, pages in alike]))
        end = next(
            (extent.start for extent, _ in alike if extent.residency is Residency.MISSING),
            alike[-1][0].start + alike[-1][1],
        )
        context.side.branch = end if end > index else 0
        if last is None:
            return [], 0
        count = [extent for extent, _ in alike].index(last) + 1
        return [*alike[: count - 1], (last, index - last.start)], count

    def twin(self, context: Context, index: int) -> PageExtent | None:
        """The extent of the tree that has the page before this index with the context's tokens, perhaps another context's."""
        if index <= context.last.end:
            return next(extent for extent in context.extents if extent.end >= index)
        tokens, extent = bytes(context.tail.tokens), context.last
        while extent.end < index:
            offset = (extent.end - context.last.end) * self._store.page_bytes
            child = extent.children.get(tokens[offset : offset + self._store.page_bytes])
            if child is None:
                return None
            num_pages = common_pages(child.tokens, tokens, offset, self._store.page_bytes)
            if child.start + num_pages < min(index, child.end):
                return None
            extent = child
        return extent

    def last_checkpoint(self, extents: Sequence[PageExtent], num_pages: int = NEVER) -> tuple[PageExtent | None, int]:
        """The last place in consecutive extents where a context can go on, by the extent that has the page before it and the
        index behind that page; (None, 0) if there is none.

        Args:
            num_pages: of the extents that count, the first ones.
        """
        last, place = None, 0
        end = extents[0].start + num_pages if extents else 0
        for extent in extents:
            full = extent.start + extent.num_tokens // self._page_size
            if index := self._side_pool.checkpoints.last(extent.checkpoints, min(full, end)):
                last, place = extent, index
            if full < extent.end:
                break
        return last, place
