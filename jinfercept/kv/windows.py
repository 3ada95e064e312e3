"""The pages of layers with a sliding window: a pool in which a context has its last pages only (see `side_pool.py`).

Such a layer reads the last `window` tokens of a context, so pages behind these are given back as the context grows. A page that
was given back cannot be computed from the middle: its tokens depend on a window before them, and so on down to the first token.
Full pages are not written again, so contexts and checkpoints share slots.
"""

from array import array
from collections.abc import Collection, Iterable
from typing import final, override

from jinfercept.kv.context import NOT_READ, Context, ContextWindow
from jinfercept.kv.extent import ContextCheckpoint, PageExtent
from jinfercept.kv.page import PageCopies
from jinfercept.kv.side_pool import SidePool, SideSizes


@final
class WindowPool(SidePool[ContextWindow]):
    """The slots of all windows and checkpoints of one model."""

    has_windows = True

    def __init__(self, sizes: SideSizes, page_size: int, prefix_caching: bool, turn_ends: Collection[int] = ()) -> None:
        super().__init__(sizes, page_size, prefix_caching, turn_ends)
        self._read: list[ContextWindow] = []

    @property
    def most_pages(self) -> int:
        """Pages that a context may have beside those of the chunk that it computes."""
        return (self._sizes.window + self._sizes.slack) // self._page_size + 2

    @override
    def new(self) -> ContextWindow:
        return ContextWindow()

    @override
    def begin(self) -> None:
        super().begin()
        for window in self._read:
            window.read_from = NOT_READ
        self._read = []

    @override
    def _spare(self, context: Context) -> None:
        if context.in_use and context.ready:
            self._trim(context, context.ready)
        super()._spare(context)

    # -- what a context has ----------------------------------------------------------------------------------------

    def _start(self, num_tokens: int) -> int:
        # index of the first page that the token behind `num_tokens` sees
        return max(0, num_tokens - self._sizes.window + 1) // self._page_size

    @override
    def reaches(self, context: Context, num_tokens: int) -> bool:
        window = self._of(context)
        if not num_tokens:
            return True
        first, end = self._needed(num_tokens)
        return (bool(window.slots) and window.first <= first and window.end >= end) or _is_copied(window, first, end)

    @override
    def is_copied(self, context: Context, num_tokens: int) -> bool:
        return _is_copied(self._of(context), *self._needed(num_tokens))

    def _needed(self, num_tokens: int) -> tuple[int, int]:
        # from the first page that the last token sees, which may be computed again, to the index behind its own page
        return self._start(num_tokens - 1), (num_tokens - 1) // self._page_size + 1

    # -- computing -------------------------------------------------------------------------------------------------

    @override
    def find_for(self, context: Context, position: int) -> bool:
        window = self._of(context)
        if not window.slots and window.host_slots:
            return self.find(len(window.host_slots))
        return self.find(int(window.end * self._page_size <= position))

    @override
    def extend(self, context: Context, end: int) -> int:
        window = self._of(context)
        assert window.slots or not window.host_slots, "a window is fetched before its context goes on"
        lacking = end - window.end
        if lacking > 0:
            if context.ready:
                self._trim(context, context.ready)
            self.find(lacking)
            self._take(context, lacking)
        return window.end

    def _trim(self, context: Context, num_tokens: int) -> None:
        window = self._of(context)
        first = self._start(min(num_tokens, window.read_from) - self._sizes.slack)
        if (behind := min(first, window.end) - window.first) > 0 and not window.fetching:
            self._slots.give(window.slots[:behind])
            del window.slots[:behind]
            window.first += behind
            if not window.slots:
                del self._contexts[context]
        if (behind := min(first, window.host_end) - window.host_first) > 0:
            self._host.give(window.host_slots[:behind], late=window.offloading)
            del window.host_slots[:behind]
            window.host_first += behind

    @override
    def _pause(self, context: Context) -> None:
        self._of(context).read_from = NOT_READ
        self.cut(context, context.num_pages)
        self._trim(context, context.num_tokens)

    @override
    def cut(self, context: Context, num_pages: int) -> None:
        window = self._of(context)
        num_kept = max(0, num_pages - window.first)
        if num_kept < len(window.slots):
            self._slots.give(window.slots[num_kept:], late=window.fetching)
            del window.slots[num_kept:]
            if not num_kept:
                self._contexts.pop(context, None)
        self._cut_host(window, num_pages)

    @override
    def computed(self, context: Context, start: int, end: int) -> None:
        window = self._of(context)
        if window.read_from == NOT_READ:
            self._read.append(window)
        window.read_from, index = min(window.read_from, start), start // self._page_size
        self._fresh.update(window.slots[max(0, index - window.first) :])
        self._cut_host(window, index)

    def _cut_host(self, window: ContextWindow, index: int) -> None:
        if window.host_end > index:
            num_kept = max(0, index - window.host_first)
            self._host.give(window.host_slots[num_kept:], late=window.offloading)
            del window.host_slots[num_kept:]

    # -- moving ----------------------------------------------------------------------------------------------------

    @override
    def _copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        window, copies = self._of(context), PageCopies()
        first, end = self._needed(num_tokens)
        if _is_copied(window, first, end):
            return copies
        if window.fetching or not window.slots or window.first > first or window.end < end:
            return None
        if not self._fresh.isdisjoint(window.slots):
            return None
        if window.host_first > first or window.host_end < first:
            self._cut_host(window, 0)
        if not window.host_slots:
            window.host_first = first
        start = window.host_end
        slots = self._take_host(end - start)
        if not slots:
            return None
        window.host_slots.extend(slots)
        window.offloading = True
        self._moving.append(window)
        copies.add(window.slots[start - window.first : end - window.first], slots)
        return copies

    @override
    def _give(self, context: Context) -> None:
        window = self._of(context)
        self._slots.give(window.slots, late=window.fetching)
        window.slots = array("i")
        self._contexts.pop(context, None)

    @override
    def free(self, context: Context) -> None:
        window = self._of(context)
        self._give(context)
        self._cut_host(window, 0)
        window.first = window.host_first = 0
        window.fetching = False

    @override
    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        num_pages = sum([min(self.most_pages, length // self._page_size + 2) for length in lengths])
        paused = [self._of(context) for context in self._contexts if beside_paused and not context.in_use]
        paused_pages = sum([len(window.slots) for window in paused])
        return num_pages + chunk_tokens // self._page_size + 1 <= self._sizes.num_slots - paused_pages

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @override
    def _first(self, index: int) -> int:
        return self._needed(index * self._page_size)[0]

    @override
    def _border(self, context: Context) -> int:
        return context.last.end

    @override
    def _mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> ContextCheckpoint | None:
        window = self._of(context)
        first = self._first(index)
        if not (window.slots and not window.fetching and window.first <= first and window.end >= index):
            return None
        assert extent.start < index <= extent.end
        slots = window.slots[first - window.first : index - window.first]
        return self._add_checkpoint(extent, index, slots, likely=likely)

    @override
    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        window = self._of(context)
        self.free(context)
        checkpoint = extent.checkpoints[index]
        window.slots, window.host_slots = self._use_checkpoint(checkpoint)
        window.first = window.host_first = checkpoint.first
        if window.slots:
            self._contexts[context] = None

    @override
    def check(self, contexts: Iterable[Context]) -> None:
        windows = [self._of(context) for context in contexts]
        self._slots.check_owners([owner.slots for owner in (*windows, *self._checkpoints)])
        self._host.check_owners([owner.host_slots for owner in (*windows, *self._copied)])
        super().check(contexts)


def _is_copied(window: ContextWindow, first: int, end: int) -> bool:
    return bool(window.host_slots) and window.host_first <= first and window.host_end >= end
