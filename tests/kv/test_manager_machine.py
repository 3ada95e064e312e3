"""Any sequence of moves keeps the pages' books, and every readable page holds what its tokens say.

The machine keeps both memories as the plans that it makes would leave them: a token's KV is the digest of the tokens up to
it, a plan is executed as fetch, drop, copy-out, compute, land, and whatever is read or stays readable is compared.
"""

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager, PageCopy
from jinfercept.kv.page import Page, Residency, chain_digest, root_digest

MAX_SEQUENCES = 4
MAX_TOKENS = 18

small = st.integers(0, 63)
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class Owner:
    """A sequence: its tokens, how many of them are accepted, and its context."""

    def __init__(self, salt: str, tokens: list[int], context: Context) -> None:
        self.salt = salt
        self.tokens = tokens
        self.context = context
        self.num_accepted = len(tokens)
        self.planned = False

    @property
    def accepted(self) -> list[int]:
        return self.tokens[: self.num_accepted]

    def kv(self, position: int) -> bytes:
        """What the KV of the token at `position` is: it depends on all tokens up to it, and on the salt."""
        return chain_digest(root_digest(self.salt), self.tokens[: position + 1])


class Computed(NamedTuple):
    """A chunk of a plan, with the page table that the runner would know."""

    owner: Owner
    slots: list[int]
    start: int
    end: int


class ManagerMachine(RuleBasedStateMachine):
    """The scheduler's part, played at random: while a plan is drafted pages move, between two plans sequences come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Owner] = []
        self.device: dict[int, dict[int, bytes]] = {}
        self.host: dict[int, dict[int, bytes]] = {}
        self.fetched: list[PageCopy] = []
        self.copied: list[PageCopy] = []
        self.chunks: list[Computed] = []
        self.drafting = False

    @initialize(pages=st.integers(3, 9), host_pages=st.sampled_from([0, 2, 5, 20]), size=st.integers(1, 3), cache=st.booleans())
    def make(self, pages: int, host_pages: int, size: int, cache: bool) -> None:
        self.size = size
        self.manager = KVManager(pages, host_pages, size, prefix_caching=cache)

    # -- between two plans -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.owners) < MAX_SEQUENCES)
    @rule(salt=st.sampled_from(["", "", "other"]), tokens=tokens_of, more=tokens_of, twin=st.booleans(), which=small)
    def open(self, salt: str, tokens: list[int], more: list[int], twin: bool, which: int) -> None:
        """A request arrives, often with the beginning of another one."""
        tokens = tokens + more
        if twin and self.owners:
            other = self.owners[which % len(self.owners)]
            salt, tokens = other.salt, other.accepted + tokens[:2]
        self.owners.append(Owner(salt, tokens[:MAX_TOKENS], self.manager.open(salt)))

    @precondition(lambda self: not self.drafting)
    @rule()
    def begin(self) -> None:
        self.manager.begin()
        self.drafting = True
        for owner in self.owners:
            owner.planned = False

    @precondition(lambda self: not self.drafting)
    @rule(which=small, returned=st.lists(st.integers(0, 1), max_size=4))
    def call(self, which: int, returned: list[int]) -> None:
        """A running sequence calls out; its result is there at once."""
        if owner := self.some(self.held(), which):
            self.manager.release(owner.context)
            owner.tokens += returned[: MAX_TOKENS - len(owner.tokens)]
            owner.num_accepted = len(owner.tokens)

    @rule(which=small)
    def close(self, which: int) -> None:
        """A request ends or is given up, in any state but with a chunk in the plan being made."""
        if owner := self.some([owner for owner in self.owners if not (self.drafting and owner.planned)], which):
            self.manager.close(owner.context)
            self.owners.remove(owner)

    # -- while a plan is drafted -----------------------------------------------------------------------------------

    @precondition(lambda self: self.drafting)
    @rule(which=small, run=st.sampled_from([True, True, True, False]))
    def admit(self, which: int, run: bool) -> None:
        """A waiting sequence looks for what others have computed, and mostly runs."""
        if owner := self.some([owner for owner in self.owners if not owner.context.held], which):
            self.manager.refresh(owner.context, owner.accepted)
            if run:
                self.manager.hold(owner.context)

    @precondition(lambda self: self.drafting)
    @rule(which=small)
    def preempt(self, which: int) -> None:
        if owner := self.some([owner for owner in self.held() if not owner.planned], which):
            self.manager.release(owner.context)

    @precondition(lambda self: self.drafting)
    @rule(which=small, most=st.sampled_from([1, 2, 3, 99]), sampled=st.integers(0, 1))
    def compute(self, which: int, most: int, sampled: int) -> None:
        """A chunk, as the scheduler cuts it: up to the next page that is or can be brought there, or a token in flight."""
        owner = self.some([owner for owner in self.held() if not owner.planned], which)
        if owner is None:
            return
        manager, context = self.manager, owner.context
        manager.advance(context)
        if context.ready == len(owner.tokens) < MAX_TOKENS:
            owner.tokens.append(sampled)  # only the device knows it
        start = min(context.ready, len(owner.tokens) - 1)
        last = start == len(owner.tokens) - 1
        end = min(start + most, len(owner.tokens) if last else manager.gap_end(context, len(owner.tokens)))
        for position in range(start, end):
            if manager.needs_slot(context, position):
                if not manager.num_free and not manager.evict_cached():
                    end = position
                    break
                manager.give_slot(context, position)
        if start < end:
            manager.computed(context, start, end)
            slots = [page.device for page in context.pages[: (end - 1) // self.size + 1]]
            assert None not in slots
            self.chunks.append(Computed(owner, [slot or 0 for slot in slots], start, end))
            owner.planned = True

    @precondition(lambda self: self.drafting)
    @rule(which=small)
    def fetch(self, which: int) -> None:
        if owner := self.some(self.held(), which):
            for page in list(self.manager.host_only(owner.context)):
                if not self.manager.num_free and not self.manager.evict_cached():
                    break
                self.fetched.append(self.manager.fetch(page))

    @precondition(lambda self: self.drafting)
    @rule(which=small, count=st.integers(1, 4))
    def copy_out(self, which: int, count: int) -> None:
        for page in self.paused_pages(which, count):
            copy = self.manager.copy_out(page)
            assert copy is None or copy == (page.device, page.host)
            self.copied += [copy] if copy else []

    @precondition(lambda self: self.drafting)
    @rule(which=small, count=st.integers(1, 4))
    def drop_device(self, which: int, count: int) -> None:
        for page in self.paused_pages(which, count):
            free = self.manager.num_free
            assert self.manager.num_free + (not self.manager.drop_device(page)) >= free
            assert page.device is None or page.refs or page.landing

    @precondition(lambda self: self.drafting)
    @rule(which=small, count=st.integers(1, 4))
    def swap_out(self, which: int, count: int) -> None:
        """Both at once, as policies do; without room on the host the page is lost."""
        for page in self.paused_pages(which, count):
            if copy := self.manager.copy_out(page):
                self.copied.append(copy)
            self.manager.drop_device(page)

    @precondition(lambda self: self.drafting)
    @rule(which=small, count=st.integers(1, 4))
    def drop_host(self, which: int, count: int) -> None:
        for page in self.paused_pages(which, count):
            if page.host is not None and not page.refs:
                self.manager.drop_host(page)

    @precondition(lambda self: self.drafting)
    @rule()
    def evict_cached(self) -> None:
        before = self.manager.occupancy()
        done = self.manager.evict_cached()
        assert self.manager.num_free == before.free + done

    @precondition(lambda self: self.drafting)
    @rule()
    def submit(self) -> None:
        """The plan is complete: execute it, accept what it sampled, and look at every page."""
        landing = {copy.device_slot: dict(self.host[copy.host_slot]) for copy in self.fetched}
        for slot in self.manager.drain_dropped():
            del self.host[slot]
        for copy in self.copied:
            assert copy.host_slot not in self.host, "a host slot holds two pages"
            self.host[copy.host_slot] = dict(self.device[copy.device_slot])
        for chunk in self.chunks:  # everybody writes before anybody reads
            for position in range(chunk.start, chunk.end):
                slot = self.device.setdefault(chunk.slots[position // self.size], {})
                slot[position % self.size] = chunk.owner.kv(position)
        for chunk in self.chunks:
            for position in range(chunk.end):
                held = self.device[chunk.slots[position // self.size]].get(position % self.size)
                assert held == chunk.owner.kv(position), f"token {position} is read from a page that does not hold it"
        for slot, content in landing.items():
            self.device[slot] = content
        for part in (self.fetched, self.copied, self.chunks):
            part.clear()
        self.drafting = False
        for owner in self.owners:
            owner.num_accepted = len(owner.tokens)
            self.manager.commit(owner.context, owner.tokens)
            self.look_at(owner)

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check([owner.context for owner in self.owners])
            free, used, claimed, cached, total = self.manager.occupancy()
            assert free + used + claimed + cached == total
            assert min(free, used, claimed, cached) >= 0

    def teardown(self) -> None:
        """When everybody is gone nothing is in use, and nothing but finished prefixes is kept."""
        if not hasattr(self, "manager"):
            return
        if self.drafting:
            self.submit()
        for owner in self.owners:
            self.manager.close(owner.context)
        self.manager.begin()
        self.manager.check([])
        occupancy = self.manager.occupancy()
        assert (occupancy.used, occupancy.claimed) == (0, 0)
        self.manager.clear()
        self.manager.check([])
        assert self.manager.num_free == occupancy.total
        assert self.manager.num_host_used == 0

    def look_at(self, owner: Owner) -> None:
        for index, page in enumerate(owner.context.pages):
            for slot, filled, memory in ((page.device, page.filled, self.device), (page.host, page.host_filled, self.host)):
                for offset in range(filled if slot is not None else 0):
                    expected = owner.kv(index * self.size + offset)
                    assert memory[slot or 0].get(offset) == expected, f"page {index} of {owner.tokens}: {page}"
        if owner.context.held:
            num_readable = min(owner.context.ready, len(owner.tokens))
            pages = owner.context.pages[: -(-num_readable // self.size)]
            assert all(page.residency in (Residency.DIRTY, Residency.CLEAN) for page in pages)

    # -- choices ---------------------------------------------------------------------------------------------------

    def held(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.context.held]

    @staticmethod
    def some(owners: list[Owner], which: int) -> Owner | None:
        return owners[which % len(owners)] if owners else None

    def paused_pages(self, which: int, count: int) -> list[Page]:
        """Pages of one paused sequence, tail first; they may be in use by another one."""
        owner = self.some([owner for owner in self.owners if not owner.context.held], which)
        return owner.context.pages[::-1][which % 3 : which % 3 + count] if owner else []


def explore(max_examples: int, steps: int) -> None:
    checks: Any = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=max_examples, stateful_step_count=steps, suppress_health_check=checks),
    )


def test_no_sequence_of_moves_loses_a_page_or_misplaces_a_token() -> None:
    explore(max_examples=60, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_long_sequence_of_moves_loses_a_page_or_misplaces_a_token() -> None:
    explore(max_examples=3000, steps=100)
