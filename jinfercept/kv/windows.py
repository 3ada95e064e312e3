"""The pages of layers with a sliding window: a pool of their own, in which a context has its last pages only.

Such a layer reads the last `window` tokens of a context, so that pages behind these are given back as the context grows, and a
paused context keeps no more than its window. What was given back cannot be computed from the middle: each of its tokens
depends on a window before it, and so on down to the first. So a context can go on where its window is and nowhere else. It is
*whole* while all its pages are on the device or on the host, and its window too; what takes the only copy of one page takes
all that are its own. Other contexts share its pages up to a *checkpoint*: a place between two pages with the window before it,
which is kept until its slots are needed. Full pages are not written again: contexts and checkpoints share slots by counting
references.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple, final

from jinfercept.kv.checkpoints import Checkpoints
from jinfercept.kv.context import Context
from jinfercept.kv.context_window import NOT_READ, ContextWindow
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import PageCopies, SlotOccupancy
from jinfercept.kv.pool import SharedSlots, SlotPool, Slots


class WindowSizes(NamedTuple):
    """The pool of layers with windows.

    Attributes:
        window: tokens that the widest window sees, the query's own among them; 0: no layers have pages of their own.
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots.
        page_cost: memory of a page, in tokens of KV of the other layers.
        slack: tokens behind the window that are kept: drafts that are not accepted shorten a context.
    """

    window: int = 0
    num_device_pages: int = 0
    num_host_pages: int = 0
    page_cost: float = 0.0
    slack: int = 0


NO_WINDOWS = WindowSizes()


@final
class WindowPool:
    """The slots of all windows and checkpoints of one model.

    Args:
        sizes: of the pool.
        page_size: tokens per page.

    Attributes:
        is_used: whether the model has layers with pages of their own.
        prefixes: the checkpoints.
    """

    def __init__(self, sizes: WindowSizes, page_size: int) -> None:
        self._sizes, self._page_size = sizes, page_size
        self.is_used = sizes.window > 0
        self._slots, self._host = SharedSlots(sizes.num_device_pages), SlotPool(sizes.num_host_pages)
        self.checkpoints = Checkpoints(self._slots)
        self._contexts: dict[Context, None] = {}  # with device slots
        self._moving: list[ContextWindow] = []
        self._read: list[ContextWindow] = []
        self._fresh: set[int] = set()  # device slots that the plan being built fills
        self._late_drops: Slots = array("i")  # the plan being built still fills them
        self._dropped: Slots = array("i")  # free, and the runner still has their arrays

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._slots.num_free

    @property
    def most_pages(self) -> int:
        """Pages that a context may have beside those of the chunk that it computes."""
        return (self._sizes.window + self._sizes.slack) // self._page_size + 2

    @property
    def has_windows(self) -> bool:
        """Whether contexts have pages of layers with windows here."""
        return self.is_used

    @property
    def has_states(self) -> bool:
        """Whether contexts have states of recurrent layers here."""
        return False

    def new(self) -> ContextWindow | None:
        """What a new context has: no page."""
        return ContextWindow() if self.is_used else None

    @property
    def slot_cost(self) -> float:
        """Memory of a page, in tokens of KV of the other layers."""
        return self._sizes.page_cost

    def occupancy(self) -> SlotOccupancy:
        """The device slots by kind."""
        used, paused = set[int](), set[int]()
        for context in self._contexts:
            if context.side is not None:
                (used if context.held else paused).update(context.side.slots)
        taken = self._sizes.num_device_pages - self.num_free
        return SlotOccupancy(self.num_free, len(used), len(paused - used), taken - len(used | paused))

    def cost(self, num_pages: int) -> int:
        """Memory of pages, in tokens of KV of the other layers."""
        return round(num_pages * self._sizes.page_cost)

    def begin(self) -> None:
        """Start a plan: pages that the last one moved have arrived."""
        for window in self._moving:
            window.fetching = window.offloading = False
        for window in self._read:
            window.read_from = NOT_READ
        self._moving, self._read = [], []
        self._fresh.clear()
        self._slots.begin()
        self._host.give(self._late_drops)
        self._dropped.extend(self._late_drops)
        self._late_drops = array("i")

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._dropped)
        del self._dropped[:]
        return dropped

    # -- what a context has ----------------------------------------------------------------------------------------

    def start(self, num_tokens: int) -> int:
        """Index of the first page that the token behind so many sees."""
        return max(0, num_tokens - self._sizes.window + 1) // self._page_size

    def reaches(self, context: Context, num_tokens: int) -> bool:
        """Whether a context that has so many tokens can go on behind them, at once or when its window is fetched."""
        window = self._of(context)
        if not num_tokens:
            return True
        first, end = self._needed(num_tokens)
        return (bool(window.slots) and window.first <= first and window.end >= end) or _is_copied(window, first, end)

    def is_there(self, context: Context) -> bool:
        """Whether a context's window can be read now: it has one, or no page."""
        if context.side is None:
            return True
        window = self._of(context)
        return (bool(window.slots) and not window.fetching) or not context.num_pages

    def is_copied(self, context: Context, num_tokens: int) -> bool:
        """Whether the host has a copy of the window of a context that has so many tokens."""
        return _is_copied(self._of(context), *self._needed(num_tokens))

    def _needed(self, num_tokens: int) -> tuple[int, int]:
        """The first page that the last of so many tokens sees, which may be computed again, and the index behind its own."""
        return self.start(num_tokens - 1), (num_tokens - 1) // self._page_size + 1

    # -- computing -------------------------------------------------------------------------------------------------

    def find(self, wanted: int) -> bool:
        """Make sure that so many device slots are free: those of checkpoints go first, then what lies behind the windows
        of running contexts, then windows of paused ones that have a copy. False if they do not suffice."""
        while self._slots.num_free < wanted and self.checkpoints.lose_first():
            pass
        if self._slots.num_free < wanted:
            for context in [*self._contexts]:
                if context.held and context.ready:
                    self.trim(context, context.ready)
                elif not context.held:
                    self.drop_device(context)
        return self._slots.num_free >= wanted

    def find_for(self, context: Context, position: int) -> bool:
        """Make sure that the device slots are free without which a context that runs cannot go on; see `find`.

        Args:
            position: of the first token that is to be computed and has no page.
        """
        window = self._of(context)
        if not window.slots and window.host:
            return self.find(len(window.host))
        return self.find(int(window.end * self._page_size <= position))

    def extend(self, context: Context, end: int) -> int:
        """Give a running context slots for the pages up to one, as far as there are some; returns the index behind the last."""
        window = self._of(context)
        assert window.slots or not window.host, "a window is fetched before its context goes on"
        lacking = end - window.end
        if lacking > 0:
            if context.ready:
                self.trim(context, context.ready)
            self.find(lacking)
            self._take(context, lacking)
        return window.end

    def trim(self, context: Context, num_tokens: int) -> None:
        """Give back the pages behind the window of a context that has so many tokens."""
        window = self._of(context)
        first = self.start(min(num_tokens, window.read_from) - self._sizes.slack)
        if (behind := min(first, window.end) - window.first) > 0 and not window.fetching:
            self._slots.give(window.slots[:behind])
            del window.slots[:behind]
            window.first += behind
            if not window.slots:
                del self._contexts[context]
        if (behind := min(first, window.host_end) - window.host_first) > 0:
            self._give_host(window, window.host[:behind])
            del window.host[:behind]
            window.host_first += behind

    def pause(self, context: Context) -> None:
        """Give back what a context does not need that the plan being built does not compute."""
        self._of(context).read_from = NOT_READ
        self.cut(context, context.num_pages)
        self.trim(context, context.num_tokens)

    def cut(self, context: Context, num_pages: int) -> None:
        """Shorten a context to its first pages."""
        window = self._of(context)
        kept = max(0, num_pages - window.first)
        if kept < len(window.slots):
            self._slots.give(window.slots[kept:], late=window.fetching)
            del window.slots[kept:]
            if not kept:
                self._contexts.pop(context, None)
        self._cut_host(window, num_pages)

    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        """Where a chunk ends that may reach up to a token."""
        return end

    def has_seen(self, context: Context, num_tokens: int) -> bool:
        """Whether a context cannot compute the last of so many tokens again."""
        return False

    def computed(self, context: Context, start: int, end: int) -> None:
        """The plan being built computes these tokens of a context: copies of its page and those behind it are out of date."""
        window = self._of(context)
        if window.read_from == NOT_READ:
            self._read.append(window)
        window.read_from, index = min(window.read_from, start), start // self._page_size
        self._fresh.update(window.slots[max(0, index - window.first) :])
        self._cut_host(window, index)

    def _cut_host(self, window: ContextWindow, index: int) -> None:
        if window.host_end > index:
            kept = max(0, index - window.host_first)
            self._give_host(window, window.host[kept:])
            del window.host[kept:]

    # -- moving ----------------------------------------------------------------------------------------------------

    def copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """Copy the window of a paused context with so many tokens to the host, as far as it has no copy; None: it cannot be."""
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
        if not window.host:
            window.host_first = first
        start = window.host_end
        if self._host.num_free < end - start:
            return None
        slots = self._host.take(end - start)
        window.host.extend(slots)
        window.offloading = True
        self._moving.append(window)
        copies.add(window.slots[start - window.first : end - window.first], slots)
        return copies

    def fetch(self, context: Context) -> PageCopies | None:
        """Bring a context's window to the device; None: there is no room, or copies are still on their way out."""
        window, copies = self._of(context), PageCopies()
        if window.slots:
            return copies
        if window.offloading or not self.find(len(window.host)):
            return None
        window.first = window.host_first
        self._take(context, len(window.host))
        window.fetching = True
        self._moving.append(window)
        copies.add(window.slots, window.host)
        return copies

    def drop_device(self, context: Context) -> None:
        """Give the device slots of a paused context back whose window has a copy."""
        window = self._of(context)
        if window.slots and not window.fetching and self.is_copied(context, context.num_tokens):
            self._slots.give(window.slots)
            window.slots = array("i")
            del self._contexts[context]

    def free(self, context: Context) -> None:
        """Take a context's window from it, on the device and on the host."""
        window = self._of(context)
        self.cut(context, 0)
        window.first = window.host_first = 0
        window.fetching = False

    def is_fetchable(self, context: Context) -> bool:
        """Whether a context's window is on the host only, and can be fetched as soon as there is room."""
        if context.side is None:
            return False
        window = self._of(context)
        return not window.slots and bool(window.host) and not window.offloading

    @property
    def first_paused(self) -> Context | None:
        """The paused context whose window has been on the device for longest."""
        return next((context for context in self._contexts if not context.held), None)

    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        """Whether contexts of so many tokens can run at once.

        Args:
            chunk_tokens: most tokens of a step.
            beside_paused: the windows of paused contexts stay.
        """
        wanted = sum([min(self.most_pages, length // self._page_size + 2) for length in lengths])
        paused = [context.side for context in self._contexts if beside_paused and not context.held]
        taken = sum([len(window.slots) for window in paused if window is not None])
        return wanted + chunk_tokens // self._page_size + 1 <= self._sizes.num_device_pages - taken

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def border(self, context: Context) -> int:
        """Index behind the last page of which contexts can go on with the same tokens, as far as it is in the tree."""
        return context.last.end

    def mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> None:
        """Make a checkpoint of a context's window before a page, if it has that.

        Args:
            extent: that has the page before it.
            likely: contexts will go on from there; else it is the first to go.
        """
        window = self._of(context)
        first, _ = self._needed(index * self._page_size)
        if index and window.slots and not window.fetching and window.first <= first and window.end >= index:
            assert extent.start < index <= extent.end
            slots = window.slots[first - window.first : index - window.first]
            self.checkpoints.add(extent.checkpoints, index, first, slots, likely=likely)

    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        """Give a context that does not run the window of a checkpoint."""
        window = self._of(context)
        self.free(context)
        window.first, window.slots = self.checkpoints.use(extent.checkpoints[index])
        self._contexts[context] = None

    # -- slots -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _of(context: Context) -> ContextWindow:
        window = context.side
        assert isinstance(window, ContextWindow)
        return window

    def _take(self, context: Context, most: int) -> None:
        """Append up to so many free device slots to a context's window."""
        slots = self._slots.take(most)
        if slots:
            self._of(context).slots.extend(slots)
            self._contexts[context] = None

    def _give_host(self, window: ContextWindow, slots: Slots) -> None:
        if window.offloading:
            self._late_drops.extend(slots)
        else:
            self._dropped.extend(slots)
            self._host.give(slots)

    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that references and slots agree; `contexts` are all open ones."""
        windows = [self._of(context) for context in contexts if context.side is not None]
        self._slots.check([owner.slots for owner in (*windows, *self.checkpoints)])
        self._host.check([*(slot for window in windows for slot in window.host), *self._late_drops])
        for context in contexts:
            assert (context in self._contexts) == bool(context.side is not None and context.side.slots)
            if not context.held and context.side is not None and (context.side.slots or context.side.host):
                assert self.reaches(context, context.num_tokens), "a window of other tokens"
                assert context.is_whole, "a window without its pages"


def _is_copied(window: ContextWindow, first: int, end: int) -> bool:
    return bool(window.host) and window.host_first <= first and window.host_end >= end
