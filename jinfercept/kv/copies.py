"""The copies of contexts' pages on the device and on the host: fetched, copied out, dropped, adopted from elsewhere; and what
keeps contexts whole that have a window or a state: where they can go on, and from where others can.

Pages are named by a range of their indexes in the context, whose order is that of the copies.
"""

from collections.abc import Iterator, Sequence
from typing import final

from jinfercept.kv.context import Context, bounds
from jinfercept.kv.extent import PageExtent, common_pages, token_bytes
from jinfercept.kv.page import PageCopies, Residency
from jinfercept.kv.side_pool import SidePool
from jinfercept.kv.store import ExtentStore
from jinfercept.kv.tails import ContextTails


@final
class ContextCopies:
    """Moves pages of contexts between the memories. Pauses, shortens and ends contexts so that their pages agree with their
    windows or states.

    Args:
        prefix_caching: contexts leave checkpoints for others.
    """

    def __init__(self, store: ExtentStore, tails: ContextTails, side_pool: SidePool, prefix_caching: bool) -> None:
        self._store, self._tails, self._page_size = store, tails, store.page_size
        self._side_pool, self._prefix_caching = side_pool, prefix_caching

    def num_fetchable(self, context: Context) -> int:
        """Pages of the context that can be fetched from the host now; its window counts as one."""
        pages = sum([extent.num_pages for extent in context.extents if extent.is_fetchable])
        return pages + self._side_pool.is_fetchable(context)

    def fetch(self, context: Context, most: int, pages: range | None = None) -> tuple[PageCopies, int]:
        """Fetch up to `most` pages of a context to slots that are free or of finished prefixes.

        They are readable from the next plan on.

        Args:
            pages: indexes of some of them, in the order in which they are fetched; None: all, first token first.

        Returns:
            The copies to make, and the tokens whose KV they move.
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

        A page can be copied if it is dirty, no plan in flight changes it, and `num_host_free` is not 0.

        Returns:
            The copies to make, and the tokens whose KV they move.
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
        """Drop pages from the device, from the host, or from both; returns how many device slots are free now.

        A page in use stays. So does one of several contexts that would be missing then: `evict_paused` takes such pages last.
        A context with a window or a state loses all that it alone has.
        """
        if context.side is not None and not context.held:
            if self._loses(context, pages, device=device, host=host):
                return self.lose(context)
            if device and context.num_pages - 1 in pages:
                self._side_pool.drop_device(context)
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
        """Whether a page that is dropped would be missing."""
        for extent, _, _ in context.parts(*bounds(pages)):
            if extent.num_contexts > 1 or extent.residency is Residency.MISSING:
                continue
            stays_on_device = extent.device is not None and not (device and extent.is_evictable)
            if not stays_on_device and (host or extent.host is None):
                return True
        return False

    def lose(self, context: Context) -> int:
        """Drop the side of a context that does not run, and all pages that no other context has; returns the device slots of
        pages that are free now."""
        self._side_pool.free(context)
        freed = 0
        for extent in list(context.extents):
            if extent.num_contexts == 1:
                freed += self._store.drop_device(extent)
                if extent.host is not None and not extent.fetching:
                    self._store.drop_host(extent)
        return freed

    def leave_device(self) -> None:
        """Free all device slots, with no context that runs and no copy in flight; what has no host copy is missing."""
        for extent in [*self._store.queues.paused, *self._store.queues.cached]:
            if extent.num_pages:
                self._store.drop_device(extent)

    def evict_paused(self, most: int = 1) -> int:
        """Free up to `most` device slots of the pages that were paused first, those of whole contexts if they have states or
        windows; returns how many."""
        if not self._side_pool.is_used:
            return self._store.evict_paused(most)
        freed, paused = 0, self._store.queues.paused
        while freed < most and (extent := next((first for first in paused if not first.fetching), None)) is not None:
            if extent.residency is Residency.CLEAN:
                freed += self._store.drop_device(extent)
                continue
            freed += sum([self.lose(context) for context in list(extent.contexts)])
            freed += self._store.drop_device(extent)
        return freed

    def evict_side(self, running: Context | None, position: int) -> int:
        """Lose a paused context if a running one lacks slots for its side at a position (see `SidePool.find_for`); returns
        the device slots of pages that are free now, and 1 at least if there was a paused context."""
        pool = self._side_pool
        if running is None or running.side is None or pool.find_for(running, position):
            return 0
        context = pool.first_paused
        return 0 if context is None else max(1, self.lose(context))

    def adopt(self, context: Context, tokens: Sequence[int], num_pages: int) -> list[int | None]:
        """Lengthen a context that does not run by full pages that come to the host from elsewhere.

        Args:
            context: without a tail. Pages of other contexts that it lacks are shared instead.
            tokens: of the context and the new pages, at least.
            num_pages: new pages.

        Returns:
            The host slot of every new page; None for a shared one. They are fewer where the host has no more room. The runner
            forgets the slots of `take_dropped` before it gets the copies.
        """
        assert not context.held
        assert not context.tail.num_pages
        store, slots, first, size = self._store, list[int | None](), context.num_pages, self._page_size
        new_bytes, offset = token_bytes(tokens[first * size : (first + num_pages) * size]), 0
        while len(slots) < num_pages:
            twin, most = self._twin(context, new_bytes, offset)
            host_slots = None
            if twin is None or twin.residency is Residency.MISSING:
                host_slots = store.take_host(most)
                twin, _ = self._twin(context, new_bytes, offset)  # to free slots may have cut it
                if not host_slots:
                    break
                most = len(host_slots)
            if twin is None:
                twin = PageExtent(start=context.last.end, shareable=context.last.shareable)
                twin.num_pages, twin.last_use = most, store.next_use()
                twin.tokens += new_bytes[offset : offset + most * store.page_bytes]
                context.last.add_child(twin, store.page_bytes)
            elif most < twin.num_pages:
                twin = store.part(twin, twin.start, twin.start + most)
            self._tails.enter(context, twin)
            if host_slots is None:
                context.shared = True
            else:
                store.adopt(twin, host_slots)
            slots += [None] * most if host_slots is None else host_slots
            offset += most * store.page_bytes
            context.tail.start = context.last.end
        return slots

    def _twin(self, context: Context, new_bytes: bytes, offset: int) -> tuple[PageExtent | None, int]:
        """The extent behind a context's last one that has the wanted tokens, and how many of its pages have; None, and the
        number of all wanted pages, where there is none."""
        page_bytes = self._store.page_bytes
        twin = context.last.children.get(new_bytes[offset : offset + page_bytes])
        if twin is None:
            return None, (len(new_bytes) - offset) // page_bytes
        return twin, common_pages(twin.tokens, new_bytes, offset, page_bytes)

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

    # -- whole contexts --------------------------------------------------------------------------------------------------

    def settle(self, context: Context) -> None:
        """Shorten a context that does not run to what it can go on from: all that it has, or what is before its last
        checkpoint. A context that has pages only stays as it is."""
        if context.side is None or self._can_go_on(context):
            return
        last, index = self._tails.last_checkpoint(context.extents)
        self._side_pool.free(context)
        self._tails.keep(context, index)
        if last is not None:
            self._side_pool.go_on(context, context.last, index)

    def pause(self, context: Context) -> None:
        """A context pauses: it keeps the window or state that its next token needs, or loses all pages that it alone has."""
        self._side_pool.pause(context)
        self._drop_last_copy(context)
        self._mark_end(context, likely=True)
        if not self._can_go_on(context):
            self.lose(context)

    def end(self, context: Context) -> None:
        """A context ends: it leaves a checkpoint behind its last full page, and gives its window or state back."""
        self._mark_end(context, likely=True)
        self._side_pool.free(context)

    def mark(self, context: Context, remaining_tokens: int) -> None:
        """Make checkpoints behind the full pages of a running context, and where others part from it.

        Args:
            remaining_tokens: tokens of its sequence that are not computed yet.
        """
        side = context.side
        assert side is not None
        self._mark_end(context, likely=remaining_tokens < self._side_pool.last_tokens)
        if self._prefix_caching and 0 < side.branch * context.page_size <= context.ready:
            extent = self._tails.twin(context, side.branch)
            if extent is not None:
                self._side_pool.mark(context, extent, side.branch, likely=True)
            side.branch = 0

    def _can_go_on(self, context: Context) -> bool:
        return context.is_whole and self._side_pool.reaches(context, context.num_tokens)

    def _mark_end(self, context: Context, *, likely: bool) -> None:
        """Make a checkpoint behind the last page that other contexts can find."""
        index = self._side_pool.border(context)
        if self._prefix_caching and index and context.last.shareable:
            extent = context.last if index == context.last.end else self._tails.twin(context, index)
            if extent is not None:
                self._side_pool.mark(context, extent, index, likely=likely)

    def _drop_last_copy(self, context: Context) -> None:
        """The last page of a paused context counts as copied only with its window or state, which is copied with it."""
        last = context.extents[-1] if context.extents else None
        if last is None or last.host is None or last.device is None or last.num_contexts > 1:
            return
        if not self._side_pool.is_copied(context, context.num_tokens):
            self._store.drop_host(self._store.part(last, last.end - 1, last.end))


def _within(context: Context, pages: range) -> Iterator[tuple[PageExtent, int, int]]:
    """The extents of pages in their order, with the first and the last but one index of those pages that are theirs."""
    first, last = bounds(pages)
    parts = context.parts(first, last)
    for extent, _, _ in parts if pages.step > 0 else reversed(parts):
        start, end = max(first, extent.start), min(last, extent.end)  # to free slots for one may have cut another
        if start < end:
            yield extent, start, end
