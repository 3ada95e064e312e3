"""What a context has beside its pages, its *side*: pages of layers with windows (`windows.py`) or a state of recurrent layers
(`states.py`). A model has one of the two at most.

With its side, a context can go on at one place only: behind all of its tokens. So a context is kept *whole*, pages and side, or
not at all. Others share its pages up to a *checkpoint*: a place between two pages that has what the next token needs.
"""

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, final, override

from jinfercept.kv.context import Context, ContextState, ContextWindow
from jinfercept.kv.extent import NEVER, TOKEN_BYTES, ContextCheckpoint, PageExtent, token_bytes
from jinfercept.kv.page import PageCopies, Residency, SlotOccupancy, SlotPool, Slots


@final
class SharedSlots(SlotPool):
    """Slots of one memory that contexts and checkpoints share by counting references."""

    def __init__(self, size: int, first: int = 0, *, notes_drops: bool = False) -> None:
        super().__init__(size, first, notes_drops=notes_drops)
        self._refs = array("i", bytes(4 * (size + first)))

    @override
    def take(self, most: int) -> Slots:
        return self.share(super().take(most))

    def share(self, slots: Slots) -> Slots:
        """Add an owner to slots; returns the slots."""
        for slot in slots:
            self._refs[slot] += 1
        return slots

    def num_owners(self, slot: int) -> int:
        return self._refs[slot]

    @override
    def give(self, slots: Slots, *, late: bool = False) -> None:
        refs, free = self._refs, array("i")
        for slot in slots:
            refs[slot] -= 1
            if not refs[slot]:
                free.append(slot)
        super().give(free, late=late)

    def check_owners(self, owned: Iterable[Slots]) -> None:
        """Assert that every slot has as many references as owners, and is free or late without any."""
        refs = array("i", bytes(4 * len(self._refs)))
        for slots in owned:
            for slot in slots:
                refs[slot] += 1
        assert refs == self._refs, "a slot's references are not its owners"
        self.check(slot for slot, count in enumerate(refs) if count)


class SideSizes(NamedTuple):
    """The sizes of a pool for states, or for pages of layers with windows."""

    num_slots: int  # of the device, numbered from 1 (0 is no context's)
    num_host_slots: int = 0
    slot_cost: float = 0.0  # memory of a slot, in tokens of KV of the other layers
    window: int = 0  # tokens that the widest window sees, the query's own among them; 0: the slots are states
    slack: int = 0  # tokens behind the window that are kept: drafts that are not accepted shorten a context


NO_SIDES = SideSizes(0)


class SidePool[Side: ContextWindow | ContextState](ABC):
    """The slots of the sides of all contexts and checkpoints of one model.

    Args:
        prefix_caching: contexts leave checkpoints for others.
        turn_ends: tokens that end a turn of a conversation: clients cut their prompts behind these.
    """

    has_windows = has_states = False

    def __init__(self, sizes: SideSizes, page_size: int, prefix_caching: bool, turn_ends: Collection[int] = ()) -> None:
        self._page_size, self._prefix_caching = page_size, prefix_caching
        self._sizes, self.slot_cost, self._turn_ends = sizes, sizes.slot_cost, turn_ends
        self._slots, self._host = SharedSlots(sizes.num_slots, 1), SharedSlots(sizes.num_host_slots, notes_drops=True)
        self._contexts: dict[Context, None] = {}  # with device slots
        self._moving: list[Side] = []
        self._offloading: list[ContextCheckpoint] = []
        self._fresh: set[int] = set()  # device slots that the plan being built writes
        self._fetched: set[int] = set()  # host slots that it fetches
        # States that the plan being built writes, and that are not found before the next.
        self._new: set[ContextCheckpoint] = set()
        # In the order in which they are lost: those that no context is likely to use, then by last use.
        self._checkpoints: OrderedDict[ContextCheckpoint, None] = OrderedDict()
        self._copied: OrderedDict[ContextCheckpoint, None] = OrderedDict()  # on the host, likewise

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def occupancy(self) -> SlotOccupancy:
        used, paused = set[int](), set[int]()
        for context in self._contexts:
            (used if context.in_use else paused).update(self._of(context).slots)
        num_used = self._slots.size - self.num_free
        return SlotOccupancy(self.num_free, len(used), len(paused - used), num_used - len(used | paused))

    def cost(self, num_slots: int) -> int:
        """Memory of slots, in tokens of KV."""
        return round(num_slots * self.slot_cost)

    def begin(self) -> None:
        """Start a plan: slots that the last plan moved have arrived, and slots that it wrote can be read."""
        for side in self._moving:
            side.fetching = side.offloading = False
        for checkpoint in self._offloading:
            checkpoint.offloading = False
        self._moving, self._offloading = [], []
        self._fresh.clear()
        self._fetched.clear()
        self._new.clear()
        self._slots.begin()
        self._host.begin()

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        return self._host.take_dropped()

    @property
    def first_paused(self) -> Context | None:
        """The paused context that has had device slots for the longest time."""
        return next((context for context in self._contexts if not context.in_use), None)

    def find(self, num_slots: int) -> bool:
        """Try to free `num_slots` device slots. Checkpoints lose theirs first, then contexts those that they can do without."""
        while self.num_free < num_slots and self._lose_checkpoint():
            pass
        if self.num_free < num_slots:
            for context in [*self._contexts]:
                if self.num_free >= num_slots:
                    break
                self._spare(context)
        return self.num_free >= num_slots

    def _spare(self, context: Context) -> None:
        # A paused context can do without its side if the host has all of it.
        if not context.in_use:
            self.drop_device(context)

    # -- the side of a context -------------------------------------------------------------------------------------

    @staticmethod
    def _of(context: Context) -> Side:
        side: Any = context.side
        return side

    @abstractmethod
    def new(self) -> Side:
        """The empty side of a new context."""

    @abstractmethod
    def reaches(self, context: Context, num_tokens: int) -> bool:
        """Whether a context of `num_tokens` tokens can go on behind them, at once or when its side is fetched."""

    def is_there(self, context: Context) -> bool:
        """Whether a context's side can be read on the device now, or the context has no page."""
        side = self._of(context)
        return (bool(side.slots) and not side.fetching) or not context.num_pages

    @abstractmethod
    def is_copied(self, context: Context, num_tokens: int) -> bool:
        """Whether the host has the side with which a context of `num_tokens` tokens goes on."""

    def has_seen(self, context: Context, num_tokens: int) -> bool:
        """Whether a context cannot compute the last of `num_tokens` tokens again."""
        return False

    # -- computing -------------------------------------------------------------------------------------------------

    @abstractmethod
    def find_for(self, context: Context, position: int) -> bool:
        """Try to free the device slots that a running context needs to go on at `position`, its first token without a page."""

    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        """Where a chunk ends that begins at `start` and may reach `end`, in a sequence of `length` tokens."""
        return end

    @abstractmethod
    def extend(self, context: Context, end: int) -> int:
        """Give a running context free slots for the side of its pages up to `end`. Returns the end of the computable pages."""

    @abstractmethod
    def computed(self, context: Context, start: int, end: int) -> None:
        """Note that the plan being built computes these tokens: host copies of slots that it writes are out of date."""

    @abstractmethod
    def cut(self, context: Context, num_pages: int) -> None:
        """Shorten the side of a context that has only its first pages left."""

    # -- moving ----------------------------------------------------------------------------------------------------

    def copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """Copy the side of a paused context, and its likely checkpoints, as far as the host lacks them; None: not now."""
        copies = self._copy_out(context, num_tokens)
        if copies:
            copied = dict(zip(copies.device, copies.host, strict=True))
            for checkpoint in self._of(context).marked:
                if checkpoint.slots and not checkpoint.host_slots and self._fresh.isdisjoint(checkpoint.slots):
                    shared = array("i", (copied[slot] for slot in checkpoint.slots if slot in copied))
                    lacking = array("i", (slot for slot in checkpoint.slots if slot not in copied))
                    self._host.share(shared)
                    taken = self._take_host(len(lacking))
                    if len(taken) < len(lacking):
                        self._host.give(shared, late=True)
                        continue
                    copied.update(zip(lacking, taken, strict=True))
                    copies.add(lacking, taken)
                    checkpoint.host_slots = array("i", (copied[slot] for slot in checkpoint.slots))
                    checkpoint.offloading = True
                    self._offloading.append(checkpoint)
                    self._copied[checkpoint] = None
        return copies

    @abstractmethod
    def _copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """As `copy_out`, without checkpoints."""

    def _take_host(self, number: int) -> Slots:
        # All of the slots or none; checkpoints give theirs up for it.
        pool = self._host
        while pool.num_free + pool.num_late < number and self._copied:
            self._lose_copy(next(iter(self._copied)))
        return pool.take(number) if pool.num_free >= number else array("i")

    def _lose_copy(self, checkpoint: ContextCheckpoint) -> None:
        del self._copied[checkpoint]
        self._host.give(checkpoint.host_slots, late=checkpoint.offloading)
        checkpoint.host_slots = array("i")

    def fetch(self, context: Context) -> PageCopies | None:
        """Copy a context's side back to the device; None: not now."""
        side, copies = self._of(context), PageCopies()
        if side.slots:
            return copies
        # the copies are on their way out, the plan fetches the slots for another context, or no device slot is free
        if side.offloading or not self._fetched.isdisjoint(side.host_slots) or not self.find(len(side.host_slots)):
            return None
        self._fetched.update(side.host_slots)
        copies.add(self._take(context, len(side.host_slots)), side.host_slots)
        side.fetching = True
        self._moving.append(side)
        return copies

    def _take(self, context: Context, most: int) -> Slots:
        slots = self._slots.take(most)
        if slots:
            self._of(context).add(slots)
            self._contexts[context] = None
        return slots

    def is_fetchable(self, context: Context) -> bool:
        """Whether a context's side is on the host only, and can be fetched as soon as slots are free."""
        side = self._of(context)
        return not side.slots and bool(side.host_slots) and not side.offloading

    def drop_device(self, context: Context) -> None:
        """Free the device slots of a paused context's side if the host has a copy of all of it."""
        side = self._of(context)
        if side.slots and not side.fetching and self.is_copied(context, context.num_tokens):
            self._give(context)

    @abstractmethod
    def _give(self, context: Context) -> None:
        """Free the device slots of a context's side."""

    @abstractmethod
    def free(self, context: Context) -> None:
        """Take a context's side from it, on the device and on the host."""

    @abstractmethod
    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        """Whether contexts of so many tokens can run at once.

        Args:
            chunk_tokens: most tokens of a step.
            beside_paused: the sides of paused contexts stay on the device.
        """

    # -- whole contexts ----------------------------------------------------------------------------------------------

    def settle(self, context: Context) -> None:
        """Shorten a context that does not run to what it can go on from: all of it, or its last checkpoint."""
        if self.can_go_on(context):
            return
        last, index = self._last_checkpoint(context.extents)
        self.free(context)
        context.keep(index)
        if last is not None:
            self.go_on(context, context.last, index)

    def pause(self, context: Context) -> None:
        """Pause a context: it keeps the window or state that its next token needs, or loses all pages that it alone has."""
        self._pause(context)
        self._drop_last_copy(context)
        if (checkpoint := self._mark_at(context, self._border(context), likely=True)) is not None:
            self._of(context).marked.append(checkpoint)
        if not self.can_go_on(context):
            self.lose(context)

    @abstractmethod
    def _pause(self, context: Context) -> None:
        """Free the slots of a context's side that its next token does not need."""

    def end(self, context: Context) -> None:
        """End a context: it leaves a checkpoint behind its last full page, and gives its window or state back."""
        self._mark_at(context, self._border(context), likely=True)
        self.free(context)

    def lose(self, context: Context) -> int:
        """Drop a context's side and all pages that no other context has; returns how many device slots of pages this freed."""
        self.free(context)
        freed = 0
        for extent in list(context.extents):
            if extent.num_contexts == 1:
                freed += context.store.drop_device(extent)
                if extent.host is not None and not extent.fetching:
                    context.store.drop_host(extent)
        return freed

    def mark(self, context: Context) -> None:
        """Make checkpoints behind the full pages of a running context, and where others are likely to part from it."""
        side = self._of(context)
        self._mark_at(context, self._border(context), likely=False)
        while side.cuts and side.cuts[0] * self._page_size <= context.ready:
            if (checkpoint := self._mark_at(context, side.cuts.pop(0), likely=True)) is not None:
                side.marked.append(checkpoint)

    def can_go_on(self, context: Context) -> bool:
        """Whether a context that does not run has all that its next token needs, on the device or on the host."""
        return context.is_whole and self.reaches(context, context.num_tokens)

    def _mark_at(self, context: Context, index: int, *, likely: bool) -> ContextCheckpoint | None:
        if (extent := self._extent_at(context, index)) is None:
            return None
        self._mark(context, extent, index, likely=likely)
        return extent.checkpoints.get(index)

    def _extent_at(self, context: Context, index: int) -> PageExtent | None:
        # The extent may be another context's with the same tokens. None: no other context would find it.
        if not (self._prefix_caching and index and context.last.shareable):
            return None
        if index <= context.last.end:
            return next(extent for extent in context.extents if extent.end >= index)
        matches = context.last.matches(bytes(context.tail.tokens), context.store.page_bytes)
        return next((extent for extent, num_pages in matches if extent.start + num_pages >= index), None)

    def _drop_last_copy(self, context: Context) -> None:
        # The last page of a paused context counts as copied only with its window or state, which is copied with it.
        last = context.extents[-1] if context.extents else None
        if last is None or last.host is None or last.device is None or last.num_contexts > 1:
            return
        if not self.is_copied(context, context.num_tokens):
            context.store.drop_host(context.store.part(last, last.end - 1, last.end))

    def share(self, context: Context, alike: list[tuple[PageExtent, int]], tokens: Sequence[int]) -> int:
        """Let a context go on behind pages that it is about to share, from their last checkpoint.

        Args:
            alike: the extents that follow its last one, with the number of their pages that are alike. Those behind the
                checkpoint are taken away.

        Returns:
            How many of these extents it shares.
        """
        # Cuts are places where other contexts are likely to part from this one, and that get checkpoints. They are where others
        # go on with the same pages and have none, where the system prompt of a new conversation ends, behind the last message,
        # before the last token, and behind it.
        count, start = 0, context.num_tokens // self._page_size
        cuts = {(len(tokens) - 1) // self._page_size, len(tokens) // self._page_size}
        if alike:
            last, index = self._last_checkpoint([extent for extent, _ in alike], sum([pages for _, pages in alike]))
            missing = (extent.start for extent, _ in alike if extent.residency is Residency.MISSING)
            cuts.add(next(missing, alike[-1][0].start + alike[-1][1]))
            if last is not None:
                start, count = index, [extent for extent, _ in alike].index(last) + 1
                alike[count - 1 :] = [(last, index - last.start)]
        rest = token_bytes(tokens[start * self._page_size :])
        for end in map(token_bytes, ([token] for token in self._turn_ends)):
            cuts.add(start + _behind_last(end, rest) // self._page_size)
            if not start:
                cuts.add(_behind_first(end, rest) // self._page_size)
        side = self._of(context)
        side.cuts, side.marked = sorted(cut for cut in cuts if cut > start), []
        return count

    # -- a disk ----------------------------------------------------------------------------------------------------

    def copied(self, context: Context, first: int, end: int) -> tuple[int, Slots]:
        """The first checkpoint behind one of the pages `first … end - 1` that has a copy on the host.

        Returns the index behind that page, and the host slots; 0 and none if there is no such checkpoint.
        """
        for extent in context.extents:
            for index, checkpoint in sorted(extent.checkpoints.items()):
                if first < index <= end and checkpoint.host_slots and not checkpoint.offloading:
                    return index, checkpoint.host_slots
        return 0, array("i")

    def num_slots(self, index: int) -> int:
        """Number of slots of a checkpoint behind a page."""
        return index - self._first(index)

    def adopt(self, context: Context) -> Slots:
        """Let a context that does not run go on behind its last page, from a checkpoint that comes to the host from elsewhere.

        Returns the host slots; none if there is a checkpoint, or no room.
        """
        extent, index, slots = context.last, context.last.end, array("i")
        checkpoint = extent.checkpoints.setdefault(index, ContextCheckpoint(self._first(index)))
        if not (checkpoint.slots or checkpoint.host_slots):
            slots = checkpoint.host_slots = self._take_host(self.num_slots(index))
            if slots:
                self._copied[checkpoint] = None
        if checkpoint.slots or checkpoint.host_slots:
            self.go_on(context, extent, index)
        return slots

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _first(self, index: int) -> int:
        """The first page of a checkpoint behind a page, see `ContextCheckpoint`."""

    @abstractmethod
    def _border(self, context: Context) -> int:
        """Index behind the last page where a checkpoint could be made of a context now; 0: there is none."""

    @abstractmethod
    def _mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> ContextCheckpoint | None:
        """Make a checkpoint behind page `index - 1`, if the context's side is of this place. A `likely` one is lost later."""

    @abstractmethod
    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        """Give a context that does not run the side of a checkpoint."""

    def _last_checkpoint(self, extents: Sequence[PageExtent], num_pages: int = NEVER) -> tuple[PageExtent | None, int]:
        # The last place in the first `num_pages` pages where a context can go on: the extent with the page before it, and the
        # index behind that page.
        last, place = None, 0
        end = extents[0].start + num_pages if extents else 0
        for extent in extents:
            full = extent.start + extent.num_tokens // self._page_size
            for index, checkpoint in extent.checkpoints.items():
                is_there = checkpoint.slots or (checkpoint.host_slots and not checkpoint.offloading)
                if place < index <= min(full, end) and is_there and checkpoint not in self._new:
                    last, place = extent, index
            if full < extent.end:
                break
        return last, place

    def _add_checkpoint(
        self, extent: PageExtent, index: int, slots: Slots, *, likely: bool
    ) -> ContextCheckpoint | None:
        # None: there is one.
        checkpoint, made = extent.checkpoints.get(index), None
        if checkpoint is None:
            checkpoint = extent.checkpoints[index] = ContextCheckpoint(self._first(index))
        if not checkpoint.slots:
            made, checkpoint.slots = checkpoint, self._slots.share(slots[:])
            self._checkpoints[checkpoint] = None
            if self.has_states:
                self._new.add(checkpoint)
            if not likely:
                self._checkpoints.move_to_end(checkpoint, last=False)
        if likely:
            self._checkpoints.move_to_end(checkpoint)
        return made

    def _use_checkpoint(self, checkpoint: ContextCheckpoint) -> tuple[Slots, Slots]:
        # Host slots are shared only if it is not on the device.
        for checkpoints in (self._checkpoints, self._copied):
            if checkpoint in checkpoints:
                checkpoints.move_to_end(checkpoint)
        if checkpoint.slots:
            return self._slots.share(checkpoint.slots[:]), array("i")
        return array("i"), self._host.share(checkpoint.host_slots[:])

    def _first_alone(self) -> ContextCheckpoint | None:
        owners = self._slots.num_owners
        return next((at for at in self._checkpoints if any(owners(slot) == 1 for slot in at.slots)), None)

    def _lose_checkpoint(self) -> bool:
        checkpoint = self._first_alone() or next(iter(self._checkpoints), None)
        if checkpoint is not None:
            self._leave_device(checkpoint)
        return checkpoint is not None

    def _leave_device(self, checkpoint: ContextCheckpoint) -> None:
        del self._checkpoints[checkpoint]
        self._slots.give(checkpoint.slots)
        checkpoint.slots = array("i")

    def forget_checkpoints(self, checkpoints: Iterable[ContextCheckpoint] | None = None) -> None:
        """Lose checkpoints, on the device and on the host; None: all of them."""
        for checkpoint in {*self._checkpoints, *self._copied} if checkpoints is None else checkpoints:
            if checkpoint.slots:
                self._leave_device(checkpoint)
            if checkpoint.host_slots:
                self._lose_copy(checkpoint)

    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that references and slots agree; `contexts` are all open ones."""
        for context in contexts:
            side = self._of(context)
            assert (context in self._contexts) == bool(side.slots)
            if not context.in_use and (side.slots or side.host_slots):
                assert self.reaches(context, context.num_tokens), "a side of other tokens"
                assert context.is_whole, "a side without its pages"


def _behind_first(token: bytes, tokens: bytes) -> int:
    at = tokens.find(token)
    while at > 0 and at % TOKEN_BYTES:  # within two other tokens
        at = tokens.find(token, at + 1)
    return at // TOKEN_BYTES + 1


def _behind_last(token: bytes, tokens: bytes) -> int:
    at = tokens.rfind(token)
    while at > 0 and at % TOKEN_BYTES:
        at = tokens.rfind(token, 0, at + TOKEN_BYTES - 1)
    return at // TOKEN_BYTES + 1
