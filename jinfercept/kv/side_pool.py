"""The pool for what a context has beside its pages: pages of layers with windows (`windows.py`), or a state of recurrent layers
(`states.py`). A model has one of the two at most, and without either the pool for windows, which is not used then.

What such layers keep of a context lets it go on at one place only: behind all of its tokens. So the context is kept *whole*,
its pages and what it has here on the device or on the host, or not at all: what takes the only copy of one page takes all that
are its own. Other contexts share its pages up to a *checkpoint*: a place between two pages with what the next token needs,
which is kept until its slots are wanted. Contexts and checkpoints share device slots by counting references.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable

from jinfercept.kv.checkpoints import Checkpoints
from jinfercept.kv.context import Context
from jinfercept.kv.context_side import ContextState, ContextWindow
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import PageCopies, SlotOccupancy
from jinfercept.kv.pool import SharedSlots, SlotPool, Slots


class SidePool(ABC):
    """The slots of the sides of all contexts and checkpoints of one model: a context's *side* is its window or its state.

    Args:
        num_slots: device slots, numbered from 1 (0 is scratch).
        num_host_slots: host slots.
        slot_cost: memory of a slot, in tokens of KV.
        last_tokens: a prompt's last checkpoint has fewer tokens behind it.
        found_later: see `Checkpoints`.

    Attributes:
        slot_cost, last_tokens: as given.
        is_used: whether contexts have sides; `has_windows` and `has_states` say which.
        checkpoints: all of them.
    """

    has_windows = has_states = False

    def __init__(
        self, num_slots: int, num_host_slots: int, slot_cost: float, last_tokens: int, *, found_later: bool
    ) -> None:
        self.slot_cost, self.last_tokens, self.is_used = slot_cost, last_tokens, num_slots > 0
        self._slots, self._host = SharedSlots(num_slots), SlotPool(num_host_slots)
        self.checkpoints = Checkpoints(self._slots, found_later=found_later)
        self._contexts: dict[Context, None] = {}  # with device slots
        self._moving: list[ContextWindow | ContextState] = []
        self._fresh: set[int] = set()  # device slots that the plan being built writes
        self._late_drops: Slots = array("i")  # the plan being built still fills them
        self._dropped: Slots = array("i")  # free, and the runner still has their arrays

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._slots.num_free

    def occupancy(self) -> SlotOccupancy:
        """The device slots by kind."""
        used, paused = set[int](), set[int]()
        for context in self._contexts:
            if context.side is not None:
                (used if context.held else paused).update(context.side.slots)
        num_used = self._slots.size - self.num_free
        return SlotOccupancy(self.num_free, len(used), len(paused - used), num_used - len(used | paused))

    def cost(self, num_slots: int) -> int:
        """Memory of slots, in tokens of KV."""
        return round(num_slots * self.slot_cost)

    def begin(self) -> None:
        """Start a plan: the slots that the last plan moved have arrived, and those that it wrote can be read."""
        for side in self._moving:
            side.fetching = side.offloading = False
        self._moving = []
        self._fresh.clear()
        self._slots.begin()
        self.checkpoints.begin()
        self._host.give(self._late_drops)
        self._dropped.extend(self._late_drops)
        self._late_drops = array("i")

    def take_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._dropped)
        del self._dropped[:]
        return dropped

    @property
    def first_paused(self) -> Context | None:
        """The paused context that has had device slots for longest."""
        return next((context for context in self._contexts if not context.held), None)

    def find(self, num_slots: int) -> bool:
        """Make sure that so many device slots are free: checkpoints lose theirs first, then contexts those that they can do
        without. False if fewer are free then."""
        while self._slots.num_free < num_slots and self.checkpoints.lose_first():
            pass
        if self._slots.num_free < num_slots:
            for context in [*self._contexts]:
                if self._slots.num_free >= num_slots:
                    break
                self._spare(context)
        return self._slots.num_free >= num_slots

    def _spare(self, context: Context) -> None:
        """Give back the device slots that a context can do without: all of a paused one whose side the host has."""
        if not context.held:
            self.drop_device(context)

    def _give_host(self, side: ContextWindow | ContextState, slots: Slots) -> None:
        if side.offloading:
            self._late_drops.extend(slots)
        else:
            self._dropped.extend(slots)
            self._host.give(slots)

    # -- the side of a context -------------------------------------------------------------------------------------

    @abstractmethod
    def new(self) -> ContextWindow | ContextState | None:
        """The empty side of a new context; None if the pool is not used."""

    @abstractmethod
    def reaches(self, context: Context, num_tokens: int) -> bool:
        """Whether a context that has so many tokens can go on behind them, at once or when its side is fetched."""

    def is_there(self, context: Context) -> bool:
        """Whether a context's side is on the device and can be read now, or the context has no side or no page."""
        side = context.side
        return side is None or (bool(side.slots) and not side.fetching) or not context.num_pages

    @abstractmethod
    def is_copied(self, context: Context, num_tokens: int) -> bool:
        """Whether the host has a copy of the side with which a context of so many tokens goes on."""

    def has_seen(self, context: Context, num_tokens: int) -> bool:
        """Whether a context cannot compute the last of so many tokens again."""
        return False

    # -- computing -------------------------------------------------------------------------------------------------

    @abstractmethod
    def find_for(self, context: Context, position: int) -> bool:
        """Make sure that the device slots are free without which a context that runs cannot go on; see `find`.

        Args:
            position: of the first token that is to be computed and has no page.
        """

    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        """Where a chunk ends that may reach up to a token.

        Args:
            start: its first token.
            end: the end that it may have.
            length: tokens of the sequence.
        """
        return end

    @abstractmethod
    def extend(self, context: Context, end: int) -> int:
        """Give a running context the slots of its side that the pages up to one need, as far as slots are free; returns the
        index behind the last page that can be computed."""

    @abstractmethod
    def computed(self, context: Context, start: int, end: int) -> None:
        """The plan being built computes these tokens of a context: the copies of slots that this changes are out of date."""

    @abstractmethod
    def pause(self, context: Context) -> None:
        """A context pauses: give back the slots of its side that its next token does not need."""

    @abstractmethod
    def cut(self, context: Context, num_pages: int) -> None:
        """Shorten the side of a context that has only its first pages left."""

    # -- moving ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """Copy the side of a paused context with so many tokens to the host, as far as the host lacks it; None: not now."""

    @abstractmethod
    def fetch(self, context: Context) -> PageCopies | None:
        """Copy a context's side back to the device; None: no slot is free, or copies are still on their way out."""

    def is_fetchable(self, context: Context) -> bool:
        """Whether a context's side is on the host only, and can be fetched as soon as slots are free."""
        side = context.side
        return side is not None and not side.slots and side.has_host and not side.offloading

    @abstractmethod
    def drop_device(self, context: Context) -> None:
        """Give the device slots of a paused context's side back if the host has a copy of all of it."""

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

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @abstractmethod
    def border(self, context: Context) -> int:
        """Index behind the last page where a checkpoint could be made of a context now; 0: there is none."""

    @abstractmethod
    def mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> None:
        """Make a checkpoint of a context before a page, if its side is that of this place.

        Args:
            extent: that has the page before it.
            likely: contexts will go on from there; else it is the first to go.
        """

    @abstractmethod
    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        """Give a context that does not run the side of a checkpoint."""

    @abstractmethod
    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that references and slots agree; `contexts` are all open ones."""
