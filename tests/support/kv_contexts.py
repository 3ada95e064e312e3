"""Contexts of a small manager, whose tokens count as computed without a runner, and what the pages of a sequence must hold."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jinfercept.kv.context import Context, ContextState, ContextWindow
from jinfercept.kv.extent import token_bytes
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import PageCopy, Residency
from jinfercept.kv.side_pool import SidePool
from tests.support.fake_runner import FakeMemories

SIZE = 4


DIRTY, CLEAN, HOST, MISSING = Residency.DIRTY, Residency.CLEAN, Residency.HOST, Residency.MISSING


def make(pages: int = 10, host_pages: int = 10, *, prefix_caching: bool = True) -> KVManager:
    manager = KVManager(pages, host_pages, SIZE, prefix_caching=prefix_caching)
    manager.begin_plan()
    return manager


def run(manager: KVManager, tokens: list[int], salt: str = "", context: Context | None = None) -> Context:
    """A running context whose tokens are all computed and accepted."""
    context = context or manager.open(salt)
    manager.refresh(context, tokens)
    manager.hold(context)
    compute(manager, context, tokens)
    return context


def compute(manager: KVManager, context: Context, tokens: list[int]) -> None:
    start = context.ready
    assert manager.place(context, start, len(tokens)) == len(tokens)
    if start < len(tokens):
        manager.computed(context, start, len(tokens))
    manager.commit(context, tokens)


def finish(manager: KVManager, tokens: list[int], salt: str = "") -> None:
    """A request that came and went: its full pages are finished prefixes."""
    manager.close(run(manager, tokens, salt))


def evict_prefixes(manager: KVManager, num_pages: int) -> int:
    """Take device pages of finished prefixes; returns how many there were."""
    store = manager._store  # pyright: ignore[reportPrivateUsage]
    return store.evict(store.cached, num_pages)


def adopted(manager: KVManager, tokens: list[int], salt: str = "") -> int:
    """Pages that a new context of these tokens would adopt."""
    context = manager.open(salt)
    manager.refresh(context, tokens)
    number = context.num_pages
    manager.close(context)
    return number


def offload(manager: KVManager, context: Context, index: int) -> PageCopy | None:
    """The copy to make of a page; None if it cannot be copied."""
    copies, _ = manager.copy_out(context, range(index, index + 1), 1)
    return copies[0] if copies else None


def swap_out(manager: KVManager, context: Context) -> None:
    copies, _ = manager.copy_out(context, range(context.num_pages), 99)
    assert len(copies) == context.num_pages
    assert manager.drop(context, context.tail_first, device=True, host=False) == context.num_pages
    manager.begin_plan()


def residencies(context: Context) -> list[Residency]:
    return [run.residency for run in context.runs() for _ in run.pages]


def host_slots(context: Context) -> list[int]:
    return [slot for extent in context.extents for slot in extent.host or ()]


def side_pool(manager: KVManager) -> SidePool:
    """The pool of a manager whose contexts have more than pages."""
    assert manager.side_pool is not None
    return manager.side_pool


class Owner:
    """A sequence: its tokens, how many of them are accepted, its context, and whether its last token is computed again."""

    def __init__(self, salt: str, tokens: list[int], context: Context) -> None:
        self.salt = salt
        self.tokens = tokens
        self.context = context
        self.num_accepted = len(tokens)
        self.planned = self.again = False

    @property
    def accepted(self) -> list[int]:
        return self.tokens[: self.num_accepted]

    def kv(self, position: int) -> bytes:
        """What the KV of the token at `position` is: it depends on all tokens up to it, and on the salt."""
        return self.salt.encode() + token_bytes(self.tokens[: position + 1])


def check_runs(context: Context, pages: range) -> None:
    """The runs of these pages show what their extents have."""
    runs, size, marks, num_tokens = context.runs(pages), context.page_size, dict[int, object](), 0
    for extent in context.extents:
        for index in range(max(extent.start, pages.start), min(extent.end, pages.stop)):
            marks[index] = extent.mark()
            num_tokens += max(0, min(size, extent.num_tokens - (index - extent.start) * size))
    assert {index: run[2:6] for run in runs for index in run.pages} == marks
    assert sum(run.num_tokens for run in runs) == num_tokens
    assert all(before[2:6] != after[2:6] for before, after in pairwise(runs))


class Computed(NamedTuple):
    """A chunk of a plan, with the page table that the runner would know."""

    owner: Owner
    slots: list[int]
    start: int
    end: int
    window: dict[int, int]
    source: int = 0
    slot: int = 0


def compute_states(chunks: Sequence[Computed], states: FakeMemories[bytes]) -> None:
    """Let the states of chunks see their tokens; what each reads has to be the state behind the tokens before it."""
    written = [chunk.slot for chunk in chunks]
    assert len(set(written)) == len(written), "two chunks write one state"
    for chunk in chunks:
        assert chunk.slot
        if chunk.start:
            assert chunk.source == chunk.slot or chunk.source not in written, "a chunk reads what another one writes"
            assert states.device[chunk.source][0] == chunk.owner.kv(chunk.start - 1), "a state of other tokens is read"
    for chunk in chunks:
        states.device[chunk.slot] = {0: chunk.owner.kv(chunk.end - 1)}


def check_owner(owner: Owner, pages: FakeMemories[bytes], window_pages: FakeMemories[bytes]) -> None:
    """Every page of a sequence that is there holds what its tokens say."""
    size = owner.context.page_size
    for extent in owner.context.extents:
        for slots, filled, memory in (
            (extent.device, extent.filled, pages.device),
            (extent.host, extent.host_filled, pages.host),
        ):
            assert slots is not None or not filled
            for offset in range(filled):
                kv = memory[slots[offset // size] if slots else 0].get(offset % size)
                position = extent.start * size + offset
                assert kv == owner.kv(position), f"token {position} of {owner.tokens}: {extent}"
        named = len(extent.tokens) // 4
        first = extent.start * size
        assert extent.tokens == token_bytes(owner.accepted[first : first + named]), f"tokens of {extent}"
    window, num_tokens = owner.context.side, owner.context.num_tokens
    if isinstance(window, ContextState) and window.position:
        for slot in window.slots:
            assert window_pages.device[slot][0] == owner.kv(window.position - 1), "a state of other tokens"
        if window.host >= 0:
            assert window_pages.host[window.host][0] == owner.kv(window.position - 1), "a copy of another state"
    for first, slots, memory in (
        ()
        if not isinstance(window, ContextWindow)
        else (
            (window.first, window.slots, window_pages.device),
            (window.host_first, window.host_slots, window_pages.host),
        )
    ):
        for position in range(first * size, min((first + len(slots)) * size, num_tokens)):
            kv = memory[slots[position // size - first]].get(position % size)
            assert kv == owner.kv(position), f"window of token {position} of {owner.tokens}"
    if owner.context.in_use:
        num_readable = min(owner.context.ready, len(owner.tokens))
        assert len(owner.context.slots(0, -(-num_readable // size))) * size >= num_readable
