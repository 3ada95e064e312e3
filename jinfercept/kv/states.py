"""The states of recurrent layers: a pool of slots in which a context has one state, whatever its length (see `side_pool.py`).

A state is of all tokens of a context up to one; it cannot be shortened. A chunk may read another slot than it writes, so a
checkpoint costs a slot and no copy: every context that begins there goes on in a slot of its own.
"""

from array import array
from collections.abc import Collection, Iterable
from typing import final, override

from jinfercept.kv.context import Context, ContextState
from jinfercept.kv.extent import ContextCheckpoint, PageExtent
from jinfercept.kv.page import PageCopies, Slots
from jinfercept.kv.side_pool import SidePool, SideSizes


@final
class StatePool(SidePool[ContextState]):
    """The slots of all states and checkpoints of one model."""

    has_states = True

    def __init__(self, sizes: SideSizes, page_size: int, prefix_caching: bool, turn_ends: Collection[int] = ()) -> None:
        super().__init__(sizes, page_size, prefix_caching, turn_ends)
        self._read: Slots = array("i")  # device slots that the plan being built reads, one reference each

    @override
    def new(self) -> ContextState:
        return ContextState()

    @override
    def begin(self) -> None:
        super().begin()
        self._slots.give(self._read)
        self._read = array("i")

    # -- what a context has ----------------------------------------------------------------------------------------

    @override
    def reaches(self, context: Context, num_tokens: int) -> bool:
        state = self._of(context)
        return not num_tokens or (state.position == num_tokens and (bool(state.slots) or state.host >= 0))

    @override
    def is_copied(self, context: Context, num_tokens: int) -> bool:
        state = self._of(context)
        return state.host >= 0 and state.position == num_tokens

    @override
    def has_seen(self, context: Context, num_tokens: int) -> bool:
        return bool(num_tokens) and context.num_pages > 0 and self._of(context).position >= num_tokens

    # -- computing -------------------------------------------------------------------------------------------------

    @override
    def find_for(self, context: Context, position: int) -> bool:
        state = self._of(context)
        return bool(state.slot) or self._is_own(state.source) or self.find(1) or self._is_own(state.source)

    @override
    def chunk_end(self, context: Context, start: int, end: int, length: int) -> int:
        size = self._page_size
        if not self._prefix_caching:
            return end
        if (cut := next((cut for cut in self._of(context).cuts if start < cut * size < end), None)) is not None:
            return cut * size
        border = end // size * size
        return border if start < border and end < length else end

    @override
    def extend(self, context: Context, end: int) -> int:
        state = self._of(context)
        if state.slot and not state.source and self._border(context):
            self._mark_page(context)
        if not state.slot and not self._is_own(state.source):
            assert state.host < 0 or state.source, "a state is fetched before its context goes on"
            self.find(1)
        if not state.slot:
            if self._is_own(state.source):
                state.slot, state.source = state.source, 0
            else:
                self._take(context, 1)
        return end if state.slot else 0

    def _mark_page(self, context: Context) -> None:
        # A context that has filled a page gets a checkpoint in place of the one behind the page before. So a context that ends
        # has one behind its last page, and only one slot is used for that.
        state, index = self._of(context), self._border(context)
        if (extent := self._extent_at(context, index)) is not None:
            if state.last_page is not None and state.last_page.slots:
                self._leave_device(state.last_page)
            if self.num_free or self._first_alone():
                state.last_page = self._mark(context, extent, index, likely=True)

    def _is_own(self, source: int) -> bool:
        # Only then may the context write it: no checkpoint, no other context and no row of the plan being built has the slot.
        return source > 0 and self._slots.num_owners(source) == 1

    @override
    def computed(self, context: Context, start: int, end: int) -> None:
        state = self._of(context)
        assert state.slot
        if state.source:
            self._read.append(state.source)
            state.source = 0
        assert state.position == start, "a state has seen other tokens"
        state.position = end
        self._fresh.add(state.slot)
        self._drop_host(state)

    @override
    def _pause(self, context: Context) -> None:
        state = self._of(context)
        if state.last_page is not None:
            state.marked.append(state.last_page)
            state.last_page = None
        if state.slot and (state.source or not state.position) and not state.fetching:
            self._slots.give(array("i", (state.slot,)))
            state.slot = 0
            if not state.source:
                del self._contexts[context]

    @override
    def cut(self, context: Context, num_pages: int) -> None:
        if not context.in_use and self._of(context).position > num_pages * self._page_size:
            self.free(context)

    # -- moving ----------------------------------------------------------------------------------------------------

    @override
    def _copy_out(self, context: Context, num_tokens: int) -> PageCopies | None:
        state, copies = self._of(context), PageCopies()
        if self.is_copied(context, num_tokens):
            return copies
        slots = state.slots
        if state.fetching or not slots or state.position != num_tokens or not self._fresh.isdisjoint(slots):
            return None
        self._drop_host(state)
        host_slots = self._take_host(1)
        if not host_slots:
            return None
        (state.host,) = host_slots
        state.offloading = True
        self._moving.append(state)
        copies.add(slots, host_slots)
        return copies

    @override
    def free(self, context: Context) -> None:
        state = self._of(context)
        self._give(context)
        self._drop_host(state)
        state.position, state.fetching, state.last_page = 0, False, None

    @override
    def have_room(self, lengths: Iterable[int], chunk_tokens: int, *, beside_paused: bool) -> bool:
        paused = sum([beside_paused and not context.in_use for context in self._contexts])
        return len([*lengths]) + paused <= self._slots.size

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @override
    def _first(self, index: int) -> int:
        return index - 1

    @override
    def _border(self, context: Context) -> int:
        position = self._of(context).position
        return 0 if position % self._page_size else position // self._page_size

    @override
    def _mark(self, context: Context, extent: PageExtent, index: int, *, likely: bool) -> ContextCheckpoint | None:
        state = self._of(context)
        if index != self._border(context) or not state.slots or state.fetching:
            return None
        assert extent.start < index <= extent.end
        if state.slot and not state.source:
            state.slot, state.source = 0, state.slot
        return self._add_checkpoint(extent, index, state.slots, likely=likely)

    @override
    def go_on(self, context: Context, extent: PageExtent, index: int) -> None:
        self.free(context)
        state = self._of(context)
        slots, host_slots = self._use_checkpoint(extent.checkpoints[index])
        state.position = index * self._page_size
        if slots:
            (state.source,) = slots
            self._contexts[context] = None
        else:
            (state.host,) = host_slots

    @override
    def _give(self, context: Context) -> None:
        state = self._of(context)
        for slot in (state.slot, state.source):
            if slot:
                late = state.fetching or slot in self._fresh
                self._slots.give(array("i", (slot,)), late=late)
        state.slot = state.source = 0
        self._contexts.pop(context, None)

    def _drop_host(self, state: ContextState) -> None:
        if state.host < 0:
            return
        self._host.give(state.host_slots, late=state.offloading)
        state.host = -1

    @override
    def check(self, contexts: Iterable[Context]) -> None:
        states = [self._of(context) for context in contexts]
        owned = [array("i", (slot,)) for state in states for slot in (state.slot, state.source) if slot]
        self._slots.check_owners([*owned, *(checkpoint.slots for checkpoint in self._checkpoints), self._read])
        self._host.check_owners([owner.host_slots for owner in (*states, *self._copied)])
        own = [state.slot for state in states if state.slot]
        assert len(set(own)) == len(own), "two contexts write one state"
        assert all(self._slots.num_owners(slot) == 1 for slot in own), "a context writes a checkpoint"
        super().check(contexts)
