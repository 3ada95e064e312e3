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
from jinfercept.kv.context_state import ContextState
from jinfercept.kv.context_window import ContextWindow
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import PageCopies, SlotOccupancy
from jinfercept.kv.pool import SharedSlots, SlotPool, Slots


class SidePool(ABC):
    """The slots of what all contexts and checkpoints of one model have beside pages.

    Args:
        num_slots: device slots, numbered from 1 (0 is scratch).
        num_host_slots: host slots.
        slot_cost: memory of a slot, in tokens of KV.
        last_tokens: a prompt's last checkpoint has fewer tokens behind it.
        found_later: see `Checkpoints`.

    Attributes:
        slot_cost, last_tokens: as given.
        is_used: whether contexts have something here; `has_windows` and `has_states` say what.
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
        taken = self._slots.size - self.num_free
        return SlotOccupancy(self.num_free, len(used), len(paused - used), taken - len(used | paused))

    def cost(self, num_slots: int) -> int:
        """Memory of slots, in tokens of KV."""
        return round(num_slots * self.slot_cost)

    def begin(self) -> None:
        """Start a plan: what the last one moved has arrived, and what it wrote can be read."""
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

    def find(self, wanted: int) -> bool:
        """Make sure that so many device slots are free: those of checkpoints go first, then what contexts can do without. False
        if they do not suffice."""
        while self._slots.num_free < wanted and self.checkpoints.lose_first():
            pass
        if self._slots.num_free < wanted:
            for context in [*self._contexts]:
                if self._slots.num_free >= wanted:
                    break
                self._spare(context)
        return self._slots.num_free >= wanted

    def _spare(self, context: Context) -> None:
        """Give back the device slots that a context can do without: of a paused one whose copies the host has, all."""
        if not context.held:
            self.drop_device(context)

    def _give_host(self, side: ContextWindow | ContextState, slots: Slots) -> None:
        if side.offloading:
            self._late_drops.extend(slots)
        else:
            self._dropped.extend(slots)
            self._host.give(slots)

    # -- what a context has ----------------------------------------------------------------------------------------

    @abstractmethod
    def new(self) -> ContextWindow | ContextState | None:
        """What a new context has here: nothing yet; None if the pool is not used."""

    @abstractmethod
    def reaches(self, context: Context, num_tokens: int) -> bool:
        """Whether a context that has so many tokens can go on behind them, at once or when what it has here is fetched."""

    @abstractmethod
    def is_there(self, context: Context) -> bool:
        """Whether what a context has here can be read now, or it has no page."""

    @abstractmethod
    def is_copied(self, context: Context, num_tokens: int) -> bool:
        """Whether the host has what a context with so many tokens needs here to go on."""

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
        """Give a running context what it needs here for the pages up to one, as far as there are slots; returns the index
        behind the last page that can be computed."""

    @abstractmethod
    def computed(self, context: Context, start: int, end: int) -> None:
        """The plan being built computes these tokens of a context: copies of what they change are out of date."""

    @abstractmethod
    def pause(self, context: Context) -> None:
        """Give back what a context does not need that the plan being built does not compute."""

    @abstractmethod
    def cut(self, context: Context, num_pages: int) -> None:
        """Shorten a context to its first pages."""

    # -- moving ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """Copy what a paused context with so many tokens has here to the host, as far as it has no copy; None: it cannot be."""

    @abstractmethod
    def fetch(self, context: Context) -> PageCopies | None:
        """Bring it back to the device; None: there is no room, or copies are still on their way out."""

    @abstractmethod
    def is_fetchable(self, context: Context) -> bool:
        """Whether it is on the host only, and can be fetched as soon as there is room."""

    @abstractmethod
    def drop_device(self, context: Context) -> None:
        """Give the device slots of a paused context back if the host has copies."""

    @abstractmethod
    def free(self, context: Context) -> None:
        """Take what a context has here from it, on the device and on the host."""

    @abstractmethod
    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        """Whether contexts of so many tokens can run at once.

        Args:
            chunk_tokens: most tokens of a step.
            beside_paused: what paused contexts have stays.
        """

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @abstractmethod
    def border(self, context: Context) -> int:
        """Index behind the last page where a checkpoint could be made of a context now; 0: there is none."""

    @abstractmethod
    def mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> None:
        """Make a checkpoint of a context before a page, if it has what that takes.

        Args:
            extent: that has the page before it.
            likely: contexts will go on from there; else it is the first to go.
        """

    @abstractmethod
    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        """Give a context that does not run what a checkpoint has."""

    @abstractmethod
    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that references and slots agree; `contexts` are all open ones."""
