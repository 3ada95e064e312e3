"""Any sequence of moves keeps the pages' books, and every readable page holds what its tokens say.

The machine keeps both memories as the plans that it makes would leave them: a token's KV are the tokens up
to it, a plan is executed as fetch, drop, copy-out, compute, land, and whatever is read or stays readable is compared.
"""

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jinfercept.kv.context import Context, ContextState, ContextWindow
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import PageCopy, Residency
from jinfercept.kv.side_pool import SideSizes
from jinfercept.sched.plan import WindowCopies
from tests.support.fake_runner import FakeMemories
from tests.support.kv_contexts import Computed, Owner, check_owner, check_runs, compute_states, evict_prefixes

MAX_SEQUENCES = 5
MAX_TOKENS = 18

small = st.integers(0, 63)
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=8)
WHATS = ["swap", "copy", "drop", "lose", "drop host", "admit", "refresh", "preempt", "abort", "evict", "prefetch"]
events = st.lists(st.tuples(st.sampled_from(WHATS), small, st.integers(0, 3), st.integers(1, 4)), max_size=5)
chunk_of = st.sampled_from([99, 1, 2, 3])


Event = tuple[str, int, int, int]


class ManagerMachine(RuleBasedStateMachine):
    """The scheduler's part, played at random: there is always a plan being drafted, and sequences pause between two."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Owner] = []
        self.pages, self.window_pages = FakeMemories[bytes](), FakeMemories[bytes]()
        self.fetched: list[PageCopy] = []
        self.copied: list[PageCopy] = []
        self.fetched_windows: list[PageCopy] = []
        self.copied_windows: list[PageCopy] = []
        self.chunks: list[Computed] = []

    @initialize(
        pages=st.sampled_from([6, 9, 4, 12, 3]),
        host_pages=st.sampled_from([20, 5, 2, 0]),
        size=st.sampled_from([2, 3, 4, 1]),
        cache=st.booleans(),
        evict=st.sampled_from(["swap", "lose"]),
        window=st.sampled_from([0, 0, 2, 3, 5, 8]),
        states=st.sampled_from([(0, 0), (3, 2), (0, 0), (6, 6), (2, 0)]),
        window_pages=st.sampled_from([12, 30, 9]),
        host_window_pages=st.sampled_from([20, 3, 0]),
    )
    def make(
        self,
        pages: int,
        host_pages: int,
        size: int,
        cache: bool,
        evict: str,
        window: int,
        states: tuple[int, int],
        window_pages: int,
        host_window_pages: int,
    ) -> None:
        self.size, self.evict, self.max_tokens = size, evict, min(MAX_TOKENS, pages * size)
        self.window, beside = window, dict[str, Any]()
        if window:
            beside["sides"] = SideSizes(window_pages, host_window_pages, 0.5, window, slack=size)
        elif states[0]:
            beside["sides"] = SideSizes(*states, 2)
        self.manager = KVManager(pages, host_pages, size, prefix_caching=cache, turn_ends=(1,), **beside)
        self.has_states = not window and states[0] > 0
        self.manager.begin_plan()
        for tokens in ([0] * 7, [0] * 5 + [1], [1, 0, 0, 1]):
            self.open("", tokens, False, 0)

    @rule(salt=st.sampled_from(["", "", "", "other"]), tokens=tokens_of, twin=st.booleans(), which=small)
    def open(self, salt: str, tokens: list[int], twin: bool, which: int) -> None:
        """A request arrives, often with the beginning of another one."""
        if len(self.owners) == MAX_SEQUENCES:
            return
        if twin and (other := self.some(self.owners, which)):
            salt, tokens = salt or other.salt, other.accepted + tokens[:2]
        self.owners.append(Owner(salt, tokens[: self.max_tokens], self.manager.open(salt)))

    @rule(which=small, count=st.integers(1, 5))
    def read(self, which: int, count: int) -> None:
        """Pages of a sequence's tokens come to the host from a disk, for another sequence, before a plan is drafted."""
        twin = self.some(self.owners, which)
        if (
            twin is None
            or len(self.owners) == MAX_SEQUENCES
            or self.fetched
            or self.copied
            or self.chunks
            or self.manager.side_pool
        ):
            return
        manager, context, size = self.manager, self.manager.open(twin.salt), self.size
        owner = Owner(twin.salt, twin.accepted, context)
        manager.refresh(context, owner.tokens)
        missing = [run.start for run in context.runs() if run.residency is Residency.MISSING]
        first = min([context.num_pages, *missing])
        manager.cut(context, first * size)
        count = min(count, (len(owner.tokens) - 1) // size - first)
        slots = manager.adopt(context, owner.tokens, count)
        assert context.num_pages == first + len(slots)
        for slot in manager.take_dropped():
            del self.pages.host[slot]
        for index, slot in enumerate(slots, first):
            if slot is not None:
                assert slot not in self.pages.host
                self.pages.host[slot] = {offset: owner.kv(index * size + offset) for offset in range(size)}
        copies = manager.host_slots(context, first, count)
        assert len(copies) <= len(slots)
        for index, slot in enumerate(copies, first):
            assert self.pages.host[slot][size - 1] == owner.kv((index + 1) * size - 1)
        self.owners.append(owner)

    # -- while a plan is drafted -----------------------------------------------------------------------------------

    @rule(events=events)
    def draft(self, events: list[Event]) -> None:
        """What happens to one sequence, or to some pages of a paused one, in use by others or not."""
        for what, which, first, count in events:
            waiting = self.some(self.waiting(), which)
            idle = self.some([owner for owner in self.owners if not owner.planned], which)
            if what == "admit" and waiting:
                self.admit(waiting)
                self.run(waiting, most=count, sampled=which % 2)
            elif what == "refresh" and waiting:
                self.manager.refresh(waiting.context, waiting.accepted)
            elif what == "preempt" and idle and idle.context.in_use:
                self.manager.release(idle.context)
            elif what == "abort" and idle:
                self.close(idle)
            elif what == "evict":
                free = self.manager.occupancy().free
                evict = partial(evict_prefixes, self.manager) if which % 2 else self.manager.evict_paused
                freed = evict(count)
                assert freed <= count or self.manager.side_pool
                if self.manager.side_pool:
                    continue
                assert self.manager.occupancy().free == free + freed
            elif what == "prefetch" and waiting:
                self.fetch(waiting.context, count, range(first, waiting.context.num_pages))
            elif waiting:
                num_pages = waiting.context.num_pages
                pages = range(num_pages)[first : first + count]
                self.move(waiting.context, pages if which % 2 else range(num_pages)[::-1][first : first + count], what)

    def move(self, context: Context, pages: range, action: str) -> None:
        if action in ("copy", "swap"):
            pool = self.manager.side_pool
            if pool is not None and not context.in_use and context.num_pages - 1 in pages:
                window_copies = pool.copy_out(context, context.num_tokens)
                if window_copies is None:
                    pages = pages[: pages.index(context.num_pages - 1)]
                self.copied_windows += window_copies or ()
            copies, _ = self.manager.copy_out(context, pages, len(pages))
            assert len(copies) <= len(pages)
            self.copied += copies
        if action != "copy":
            free = self.manager.occupancy().free
            device, host = action != "drop host", action in ("lose", "drop host")
            freed = self.manager.drop(context, pages, device=device, host=host)
            assert self.manager.occupancy().free == free + freed

    def fetch(self, context: Context, most: int, pages: range | None = None) -> int:
        pool = self.manager.side_pool
        copies = pool.fetch(context) if pool is not None and pool.is_fetchable(context) else ()
        if copies is None:
            return 0
        self.fetched_windows += copies
        host_slots = [copy.host_slot for copy in self.fetched_windows]
        assert len(set(host_slots)) == len(host_slots), "a plan fetches a host slot once"
        page_copies, _ = self.manager.fetch(context, most, pages)
        self.fetched += page_copies
        return len(page_copies) + bool(copies)

    # -- a whole plan ----------------------------------------------------------------------------------------------

    @rule(
        admits=st.lists(small, min_size=1, max_size=3),
        chunks=st.lists(chunk_of, min_size=1, max_size=3),
        sampled=st.integers(0, 1),
        events=events,
        calls=st.lists(small, max_size=2),
        returned=st.lists(st.integers(0, 1), max_size=4),
        end=st.sampled_from([None, None, 0, 1, 2]),
    )
    def plan(
        self,
        admits: list[int],
        chunks: list[int],
        sampled: int,
        events: list[Event],
        calls: list[int],
        returned: list[int],
        end: int | None,
    ) -> None:
        """Complete the plan with whoever runs and some who wait, execute it, and look at every page.

        Then sequences call out, with results at once, or one ends and another with the same beginning comes.
        """
        running = self.held()
        for which in admits:
            if owner := self.some(self.waiting(), which):
                self.admit(owner)
                running.append(owner)
        for index, owner in enumerate(running):
            self.run(owner, chunks[index % len(chunks)], sampled)
        self.draft(events)
        self.execute()
        for which in calls:
            if owner := self.some(self.held(), which):
                self.manager.release(owner.context)
                owner.tokens += returned[: self.max_tokens - len(owner.tokens)]
                owner.num_accepted, owner.again = len(owner.tokens), not returned
        if end is not None and (owner := self.some(self.owners, end)):
            self.close(owner)
            self.open(owner.salt, owner.tokens[: 3 * end + 5] + returned, False, 0)
        self.manager.begin_plan()
        for owner in self.owners:
            owner.planned = False

    def execute(self) -> None:
        manager = self.manager
        landing = self.pages.begin(WindowCopies(self.copied, self.fetched, manager.take_dropped()))
        copies = WindowCopies(self.copied_windows, self.fetched_windows, manager.take_dropped_sides())
        landing_windows = self.window_pages.begin(copies)
        for chunk in self.chunks:  # everybody writes before anybody reads
            for position in range(chunk.start, chunk.end):
                slot = self.pages.device.setdefault(chunk.slots[position // self.size], {})
                slot[position % self.size] = chunk.owner.kv(position)
                if self.window:
                    page = self.window_pages.device.setdefault(chunk.window[position // self.size], {})
                    page[position % self.size] = chunk.owner.kv(position)
        if self.has_states:
            compute_states(self.chunks, self.window_pages)
        for chunk in self.chunks:
            for position in range(chunk.end):
                read = self.pages.device[chunk.slots[position // self.size]].get(position % self.size)
                assert read == chunk.owner.kv(position), f"token {position} is read from a page that does not hold it"
            for position in range(max(0, chunk.start - self.window + 1), chunk.end) if self.window else ():
                read = self.window_pages.device[chunk.window[position // self.size]].get(position % self.size)
                assert read == chunk.owner.kv(position), f"token {position} is read from a window that does not hold it"
        self.pages.device |= landing
        self.window_pages.device |= landing_windows
        for part in (self.fetched, self.copied, self.fetched_windows, self.copied_windows, self.chunks):
            part.clear()
        for owner in self.owners:
            if owner.num_accepted < len(owner.tokens) or owner.planned:
                owner.num_accepted = len(owner.tokens)
                self.manager.commit(owner.context, owner.tokens)
            check_owner(owner, self.pages, self.window_pages)

    # -- the parts -------------------------------------------------------------------------------------------------

    def admit(self, owner: Owner) -> None:
        self.manager.step_back(owner.context, owner.num_accepted)
        self.manager.refresh(owner.context, owner.accepted)
        self.manager.hold(owner.context)

    def run(self, owner: Owner, most: int, sampled: int) -> None:
        """Fetches and a chunk as the scheduler cuts it: up to the next page that is or can be brought there."""
        if owner.planned or not owner.context.in_use:
            return
        manager, context = self.manager, owner.context
        manager.advance(context)
        left = manager.num_fetchable(context)
        while left and self.slot_free(owner, context.ready):
            fetched = self.fetch(context, left)
            if not fetched:
                break
            left -= fetched
        if context.ready == len(owner.tokens) < self.max_tokens and not owner.again:
            owner.tokens.append(sampled)  # only the device knows it yet
        length = len(owner.tokens)
        if self.has_states and context.ready == length:
            manager.release(context)
            manager.step_back(context, length)
            manager.hold(context)
        start = min(context.ready, length - 1)
        is_last = start == length - 1 and manager.is_there(context)
        end = min(start + most, length if is_last else manager.gap_end(context, length))
        if manager.side_pool and end > start:
            end = manager.side_pool.chunk_end(context, start, end, length)
        wanted, end = end, manager.place(context, start, end)
        while end < wanted and self.slot_free(owner, end):
            end = manager.place(context, end, wanted)
        if start < end:
            window = context.side
            state = (window.source or window.slot, window.slot) if isinstance(window, ContextState) else (0, 0)
            manager.computed(context, start, end)
            manager.commit(context, owner.accepted)
            if manager.side_pool:
                manager.side_pool.mark(context)
            slots = context.slots(0, (end - 1) // self.size + 1)
            entries = dict(enumerate(window.slots, window.first)) if isinstance(window, ContextWindow) else {}
            self.chunks.append(Computed(owner, list(slots), start, end, entries, *state))
            owner.planned, owner.again = True, False

    def slot_free(self, owner: Owner, position: int) -> bool:
        """Find a device slot: a finished prefix, pages of paused sequences, then those of the last one that runs go."""
        while not self.manager.free_slot(owner.context, position):
            for paused in reversed(self.waiting()):
                for index in paused.context.tail_first:
                    self.move(paused.context, range(index, index + 1), self.evict)
                    if self.manager.free_slot(owner.context, position):
                        return True
            if self.manager.evict_paused(2) or self.manager.evict_side(owner.context, position):
                return True
            idle = [other for other in self.held() if other is not owner and not other.planned]
            if not idle:
                return False
            self.manager.release(idle[-1].context)
        return True

    def close(self, owner: Owner) -> None:
        self.manager.close(owner.context)
        self.owners.remove(owner)

    def waiting(self) -> list[Owner]:
        return [owner for owner in self.owners if not owner.context.in_use]

    def held(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.context.in_use]

    @staticmethod
    def some(owners: list[Owner], which: int) -> Owner | None:
        return owners[which % len(owners)] if owners else None

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check([owner.context for owner in self.owners])
            for context in (owner.context for owner in self.owners):
                runs, extents, middle = context.runs(), context.extents, range(1, context.num_pages - 1)
                for pages in (range(context.num_pages), middle):
                    check_runs(context, pages)
                context.forget_extents()
                assert (context.runs(), context.extents) == (runs, extents), "a change was not noticed"
            free, used, claimed, cached, total, *_ = self.manager.occupancy()
            assert free + used + claimed + cached == total
            assert min(free, used, claimed, cached) >= 0

    def teardown(self) -> None:
        """When everybody is gone nothing is in use, and nothing but finished prefixes is kept."""
        if not hasattr(self, "manager"):
            return
        self.execute()
        for owner in self.owners:
            self.manager.close(owner.context)
        self.manager.begin_plan()
        self.manager.check([])
        occupancy = self.manager.occupancy()
        assert (occupancy.used, occupancy.paused) == (0, 0)
        self.manager.drop_prefixes()
        self.manager.check([])
        assert self.manager.occupancy().free == occupancy.total
        assert self.manager.occupancy().host == 0
        if (pool := self.manager.side_pool) is not None:
            pool.forget_checkpoints()
            pool.check([])


def explore(max_examples: int, steps: int) -> None:
    checks: Any = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=max_examples, stateful_step_count=steps, suppress_health_check=checks),
    )


def test_no_sequence_of_moves_loses_a_page_or_misplaces_a_token() -> None:
    explore(max_examples=40, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_long_sequence_of_moves_loses_a_page_or_misplaces_a_token() -> None:
    explore(max_examples=3000, steps=100)
