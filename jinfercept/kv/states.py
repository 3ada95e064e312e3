"""The states of recurrent layers: a pool of slots in which a context has one state, whatever its length.

A state is of all tokens of a context up to one, and of no fewer: it cannot be shortened. So a context can go on where its
state is and nowhere else. It is *whole* while all its pages are on the device or on the host, and its state too; what takes the
only copy of one page takes all that are its own. Other contexts share its pages up to a *checkpoint*: a place between two pages
with the state behind the first, which is kept until its slot is needed. A chunk may read another slot than it writes, so that a
checkpoint costs a slot and no copy: the context that made it, and every other one that begins there, goes on in a slot of its
own. The pool offers what the pool of windows does (`windows.py`), so that the manager and the scheduler treat both alike.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple, final

from jinfercept.kv.checkpoints import Checkpoints
from jinfercept.kv.context import Context
from jinfercept.kv.context_state import ContextState
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.page import PageCopies, SlotOccupancy
from jinfercept.kv.pool import SharedSlots, SlotPool, Slots

LEAST_MARKED_PAGES = 4
"""Pages of a prompt that are computed at its end for which a chunk ends behind the last full one; the rest is one more."""


class StateSizes(NamedTuple):
    """The pool of states.

    Attributes:
        num_states: device slots, numbered from 1 (0 is no context's); 0: the model has no recurrent layers.
        num_host_states: host slots.
        state_size: memory of a state, in tokens of KV.
    """

    num_states: int = 0
    num_host_states: int = 0
    state_size: int = 0


NO_STATES = StateSizes()


@final
class StatePool:
    """The slots of all states and checkpoints of one model.

    Args:
        sizes: of the pool.
        page_size: tokens per page.
        prefix_caching: chunks end where contexts leave checkpoints.

    Attributes:
        is_used: whether the model has recurrent layers.
        prefixes: the checkpoints.
    """

    def __init__(self, sizes: StateSizes, page_size: int, prefix_caching: bool) -> None:
        self._sizes, self._page_size, self._prefix_caching = sizes, page_size, prefix_caching
        self.is_used = sizes.num_states > 0
        self._slots, self._host = SharedSlots(sizes.num_states), SlotPool(sizes.num_host_states)
        self.checkpoints = Checkpoints(self._slots, found_later=True)
        self._contexts: dict[Context, None] = {}  # with a device slot
        self._moving: list[ContextState] = []
        self._fresh: set[int] = set()  # device slots that the plan being built writes
        self._read: Slots = array("i")  # device slots that the plan being built reads, one reference each
        self._late_drops: Slots = array("i")  # the plan being built still fills them
        self._dropped: Slots = array("i")  # free, and the runner still has their arrays

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._slots.num_free

    @property
    def has_windows(self) -> bool:
        """Whether contexts have pages of layers with windows here."""
        return False

    @property
    def has_states(self) -> bool:
        """Whether contexts have states of recurrent layers here."""
        return self.is_used

    def new(self) -> ContextState:
        """What a new context has: no state."""
        return ContextState()

    @property
    def slot_cost(self) -> float:
        """Memory of a state, in tokens of KV."""
        return self._sizes.state_size

    def occupancy(self) -> SlotOccupancy:
        """The device slots by kind."""
        used, paused = set[int](), set[int]()
        for context in self._contexts:
            (used if context.held else paused).update(self._of(context).slots)
        taken = self._sizes.num_states - self.num_free
        return SlotOccupancy(self.num_free, len(used), len(paused - used), taken - len(used | paused))

    def cost(self, num_slots: int) -> int:
        """Memory of states, in tokens of KV."""
        return num_slots * self._sizes.state_size

    def begin(self) -> None:
        """Start a plan: what the last one moved has arrived, and what it wrote can be read."""
        for state in self._moving:
            state.fetching = state.offloading = False
        self._moving = []
        self._fresh.clear()
        self._slots.give(self._read)
        self._read = array("i")
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

    # -- what a context has ----------------------------------------------------------------------------------------

    def reaches(self, context: Context, num_tokens: int) -> bool:
        """Whether a context that has so many tokens can go on behind them, at once or when its state is fetched."""
        state = self._of(context)
        return not num_tokens or (state.position == num_tokens and (bool(state.slots) or state.host >= 0))

    def is_there(self, context: Context) -> bool:
        """Whether a context's state can be read now: it has one, or no page."""
        state = self._of(context)
        return (bool(state.slots) and not state.fetching) or not context.num_pages

    def is_copied(self, context: Context, num_tokens: int) -> bool:
        """Whether the host has a copy of the state of a context that has so many tokens."""
        state = self._of(context)
        return state.host >= 0 and state.position == num_tokens

    def has_seen(self, context: Context, num_tokens: int) -> bool:
        """Whether a context's state has seen so many tokens, the last of which cannot be computed again."""
        return bool(num_tokens) and context.num_pages > 0 and self._of(context).position >= num_tokens

    # -- computing -------------------------------------------------------------------------------------------------

    def find(self, wanted: int) -> bool:
        """Make sure that so many device slots are free: those of checkpoints go first, then states of paused contexts that have
        a copy. False if they do not suffice."""
        while self._slots.num_free < wanted and self.checkpoints.lose_first():
            pass
        if self._slots.num_free < wanted:
            for context in [*self._contexts]:
                if not context.held:
                    self.drop_device(context)
        return self._slots.num_free >= wanted

    def find_for(self, context: Context, position: int) -> bool:
        """Make sure that there is a slot that a context which runs can write, or one for its copy; see `find`."""
        state = self._of(context)
        return bool(state.slot) or self._is_own(state.source) or self.find(1) or self._is_own(state.source)

    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        """Where a chunk ends that may reach up to a token: at a page, so that it leaves a checkpoint, before it goes on.

        Args:
            start: its first token.
            end: the end that it may have.
            length: tokens of the sequence.
        """
        size, branch = self._page_size, self._of(context).branch * self._page_size
        if not self._prefix_caching:
            return end
        if start < branch < end:
            return branch
        border = end // size * size
        return border if border > start and (end < length or border - start >= LEAST_MARKED_PAGES * size) else end

    def extend(self, context: Context, end: int) -> int:
        """Give a running context a slot to write, if there is one; returns the index behind the last page that it can compute:
        `end`, or 0."""
        state = self._of(context)
        if not state.slot and not self._is_own(state.source):
            assert state.host < 0 or state.source, "a state is fetched before its context goes on"
            self.find(1)
        if not state.slot:
            if self._is_own(state.source):
                state.slot, state.source = state.source, 0
            elif slots := self._slots.take(1):
                (state.slot,) = slots
                self._contexts[context] = None
        return end if state.slot else 0

    def _is_own(self, source: int) -> bool:
        """Whether a context can write the slot from which it goes on: nobody else has it, and no plan reads it."""
        return source > 0 and self._slots.num_owners(source) == 1

    def computed(self, context: Context, start: int, end: int) -> None:
        """The plan being built computes these tokens of a context: it reads a slot and writes one, and a copy ends."""
        state = self._of(context)
        assert state.slot
        if state.source:
            self._read.append(state.source)
            state.source = 0
        assert state.position == start, "a state has seen other tokens"
        state.position = end
        self._fresh.add(state.slot)
        self._drop_host(state)

    def pause(self, context: Context) -> None:
        """Give back a slot that a context has not written."""
        state = self._of(context)
        if state.slot and (state.source or not state.position) and not state.fetching:
            self._slots.give(array("i", (state.slot,)))
            state.slot = 0
            if not state.source:
                del self._contexts[context]

    def cut(self, context: Context, num_pages: int) -> None:
        """Shorten a context to its first pages: a state that has seen more is lost."""
        if not context.held and self._of(context).position > num_pages * self._page_size:
            self.free(context)

    # -- moving ----------------------------------------------------------------------------------------------------

    def copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        """Copy the state of a paused context with so many tokens to the host, unless it has a copy; None: it cannot be."""
        state, copies = self._of(context), PageCopies()
        if self.is_copied(context, num_tokens):
            return copies
        slots = state.slots
        if state.fetching or not slots or state.position != num_tokens or not self._fresh.isdisjoint(slots):
            return None
        self._drop_host(state)
        taken = self._host.take(1)
        if not taken:
            return None
        (state.host,) = taken
        state.offloading = True
        self._moving.append(state)
        copies.add(slots, taken)
        return copies

    def fetch(self, context: Context) -> PageCopies | None:
        """Bring a context's state to the device; None: there is no room, or the copy is still on its way out."""
        state, copies = self._of(context), PageCopies()
        if state.slots:
            return copies
        if state.offloading or not self.find(1):
            return None
        taken = self._slots.take(1)
        (state.slot,) = taken
        self._contexts[context] = None
        state.fetching = True
        self._moving.append(state)
        copies.add(taken, array("i", (state.host,)))
        return copies

    def drop_device(self, context: Context) -> None:
        """Give the device slot of a paused context back whose state has a copy."""
        state = self._of(context)
        if state.slots and not state.fetching and self.is_copied(context, context.num_tokens):
            self._give(context, state)

    def free(self, context: Context) -> None:
        """Take a context's state from it, on the device and on the host."""
        state = self._of(context)
        self._give(context, state)
        self._drop_host(state)
        state.position, state.fetching = 0, False

    def is_fetchable(self, context: Context) -> bool:
        """Whether a context's state is on the host only, and can be fetched as soon as there is room."""
        state = self._of(context)
        return not state.slots and state.host >= 0 and not state.offloading

    @property
    def first_paused(self) -> Context | None:
        """The paused context whose state has been on the device for longest."""
        return next((context for context in self._contexts if not context.held), None)

    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        """Whether contexts of so many tokens can run at once.

        Args:
            chunk_tokens: most tokens of a step.
            beside_paused: the states of paused contexts stay.
        """
        paused = sum([beside_paused and not context.held for context in self._contexts])
        return len([*lengths]) + paused <= self._sizes.num_states

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def border(self, context: Context) -> int:
        """Index behind the last page of which a context's state has seen all tokens, and no others; 0: there is none."""
        position = self._of(context).position
        return 0 if position % self._page_size else position // self._page_size

    def mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> None:
        """Make a checkpoint of a context's state before a page, if it is there. The context then writes another slot.

        Args:
            extent: that has the page before it.
            likely: contexts will go on from there; else it is the first to go.
        """
        state = self._of(context)
        if index and index == self.border(context) and state.slots and not state.fetching:
            assert extent.start < index <= extent.end
            if state.slot and not state.source:
                state.slot, state.source = 0, state.slot
            self.checkpoints.add(extent.checkpoints, index, index - 1, state.slots, likely=likely)

    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        """Give a context that does not run the state of a checkpoint."""
        self.free(context)
        state = self._of(context)
        _, (state.source,) = self.checkpoints.use(extent.checkpoints[index])
        state.position = index * self._page_size
        self._contexts[context] = None

    # -- slots -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _of(context: Context) -> ContextState:
        state = context.side
        assert isinstance(state, ContextState)
        return state

    def _give(self, context: Context, state: ContextState) -> None:
        """Give a context's device slots back."""
        for slot in (state.slot, state.source):
            if slot:
                late = state.fetching or slot in self._fresh
                self._slots.give(array("i", (slot,)), late=late)
        state.slot = state.source = 0
        self._contexts.pop(context, None)

    def _drop_host(self, state: ContextState) -> None:
        if state.host < 0:
            return
        slots = array("i", (state.host,))
        state.host = -1
        if state.offloading:
            self._late_drops.extend(slots)
        else:
            self._dropped.extend(slots)
            self._host.give(slots)

    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that references and slots agree; `contexts` are all open ones."""
        states = [self._of(context) for context in contexts]
        owned = [array("i", (slot,)) for state in states for slot in (state.slot, state.source) if slot]
        self._slots.check([*owned, *(checkpoint.slots for checkpoint in self.checkpoints), self._read])
        self._host.check([*(state.host for state in states if state.host >= 0), *self._late_drops])
        own = [state.slot for state in states if state.slot]
        assert len(set(own)) == len(own), "two contexts write one state"
        assert all(self._slots.num_owners(slot) == 1 for slot in own), "a context writes a checkpoint"
        for context, state in zip(contexts, states, strict=True):
            assert (context in self._contexts) == bool(state.slots)
            if not context.held and (state.slots or state.host >= 0):
                assert self.reaches(context, context.num_tokens), "a state of other tokens"
                assert context.is_whole, "a state without its pages"
