"""Sequences whose KV are the tokens up to each, and what their pages must hold."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jinfercept.kv.context import Context, ContextState, ContextWindow
from jinfercept.kv.extent import token_bytes
from tests.support.fake_runner import FakeMemories


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
