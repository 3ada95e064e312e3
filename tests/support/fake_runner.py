"""A runner whose KV is the token ids themselves: whatever page goes to the wrong place, the next token is another one."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.sched.plan import FROM_DEVICE, Chunk, Masks, NewPages, StepPlan, StepResult, WindowCopies, WindowEntries
from jinfercept.sched.speculation import kept

VOCAB = 97
MOST_DRAFTS = 7
"""That a layer writes behind a draw."""
"""Token ids of the fake model are below it."""


FakeModel = Callable[[list[int], Sequence[int] | None], int]


def next_token(context: list[int], words: Sequence[int] | None = None) -> int:
    """The token that the fake model writes after a context; only one that the words of a mask allow, if there are any."""
    draw = hashlib.sha256(array("q", context).tobytes()).digest()[0]
    if words is None:
        return draw % VOCAB
    allowed = [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1]
    return allowed[draw % len(allowed)]


class FakeMemories[KV]:
    """The pages of one pool and their host copies.

    Attributes:
        device, host: by slot and offset, what stands for a token's keys and values.
    """

    def __init__(self) -> None:
        self.device: dict[int, dict[int, KV]] = {}
        self.host: dict[int, dict[int, KV]] = {}

    def begin(self, moves: StepPlan | WindowCopies) -> dict[int, dict[int, KV]]:
        """What leaves the device, or comes: pages by the device slots where they land behind the compute."""
        landing = {copy.device_slot: dict(self.host[copy.host_slot]) for copy in moves.fetch}
        assert len(landing) == len(moves.fetch), "two pages land in a slot"
        for slot in moves.drop:
            del self.host[slot]
        for copy in moves.offload:
            assert copy.host_slot not in self.host, "a host slot holds two pages"
            self.host[copy.host_slot] = dict(self.device[copy.device_slot])
        return landing


class FakePages(FakeMemories[tuple[int, int]]):
    """Such pages of positions and tokens, and the page tables.

    Attributes:
        tables: by sequence slot and page number, device slots.
    """

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.tables: dict[int, dict[int, int]] = {}

    def enter(self, chunk: Chunk, entries: WindowEntries | tuple[()]) -> None:
        """Take entries of a page table, and empty the pages that the chunk begins."""
        table = self.tables.setdefault(chunk.slot, {})
        if entries:
            table.update(enumerate(entries.slots, entries.first))
        for position in range(chunk.start, chunk.start + len(chunk.tokens)):
            if position % self.page_size == 0:
                self.device[table[position // self.page_size]] = {}

    def write(self, slot: int, position: int, token: int) -> None:
        page = self.tables[slot][position // self.page_size]
        assert page != 0
        self.device[page][position % self.page_size] = (position, token)

    def read(self, slot: int, start: int, end: int) -> list[int]:
        """A sequence's tokens."""
        table, size = self.tables[slot], self.page_size
        entries = [self.device[table[place // size]].get(place % size) for place in range(start, end)]
        assert [entry and entry[0] for entry in entries] == list(range(start, end)), "a context has a hole"
        return [entry[1] for entry in entries if entry]


class FakeStates(FakeMemories[tuple[int, ...]]):
    """States that are the tokens they have seen, all at offset 0, and the slots of the sequences' states."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, int] = {}
        self.sources: dict[int, int] = {}

    def enter(self, chunk: Chunk) -> None:
        """Take the slots that a chunk names."""
        if chunk.new_pages:
            self.slots[chunk.slot] = chunk.new_pages.state
        self.sources[chunk.slot] = (chunk.new_pages and chunk.new_pages.state_from) or self.slots[chunk.slot]

    def compute(self, chunks: Sequence[tuple[Chunk, list[int]]]) -> None:
        """Let the states of rows see the tokens of their chunks, which have to be behind those that they have seen."""
        written = {self.slots[chunk.slot] for chunk, _ in chunks}
        assert len(written) == len(chunks), "two rows write one state"
        assert 0 not in written, "a row has no state"
        for chunk, tokens in chunks:
            source, slot = self.sources[chunk.slot], self.slots[chunk.slot]
            if chunk.start:
                assert source == slot or source not in written, "a row reads a state that another one writes"
                seen = self.device[source][0]
                assert list(seen) == tokens[: chunk.start], f"a state of {len(seen)} tokens is read at {chunk.start}"
        for chunk, tokens in chunks:
            self.device[self.slots[chunk.slot]] = {0: tuple(tokens)}


class FakeForward(NamedTuple):
    """The slots and contexts of a plan's sampled rows, and the drafts that the plan awaited."""

    contexts: list[tuple[int, list[int]]]
    drafts: tuple[tuple[int, ...], ...]


class FakeRunner:
    """Executes plans on pages of token ids, in the order that `StepPlan` fixes, and asserts what a real one assumes.

    Args:
        page_size: tokens per page.
        buckets: query tokens of the executables.
        fail_at: number of the plan that raises, from 1; None: none does.
        write: the model: a token for a context and the words of a mask.
        draft: the draft model, of whose tokens one of three is replaced by another; None: the same model.
        window: tokens that a token has to find in the pages of layers with a window; None: there is no pool for these.
        has_states: the model has recurrent layers.

    Attributes:
        plans: all of them, with the drafts of the draft model.
        drafted: these drafts, by the slots of the last plan's chunks.
    """

    def __init__(
        self,
        page_size: int,
        buckets: tuple[int, ...],
        fail_at: int | None = None,
        write: FakeModel | None = None,
        draft: FakeModel | None = None,
        window: int | None = None,
        has_states: bool = False,
    ) -> None:
        self.has_states = has_states
        self.page_size, self.buckets, self.fail_at = page_size, buckets, fail_at
        self.write = write or next_token
        self.draft, self.window = draft or self.write, window
        self.plans: list[StepPlan] = []
        self.reset()

    def reset(self) -> None:
        self.pages, self.window_pages = FakePages(self.page_size), FakePages(self.page_size)
        self.states = FakeStates()
        self.last: dict[int, int] = {}
        self.drafted: dict[int, tuple[int, ...]] = {}
        self.unsampled = False  # a forward pass was dispatched, its sampling was not

    def close(self) -> None:
        self.reset()

    def forward(self, plan: StepPlan) -> FakeForward:
        """The slots and contexts of the plan's sampled rows, as attention sees them: before pages are scattered."""
        assert not self.unsampled, "a plan follows one that was not sampled"
        self.unsampled = True
        self.plans.append(plan)
        if self.fail_at == len(self.plans):
            raise RuntimeError("the device is gone")
        assert self.window is not None or self.has_states or plan.window is None
        beside: Any = self.states if self.has_states else self.window_pages
        landing, landing_beside = self.pages.begin(plan), beside.begin(plan.window or WindowCopies())
        for chunk in plan.chunks:
            first, slots, _, window, _ = chunk.new_pages or NewPages(0, ())
            self.pages.enter(chunk, WindowEntries(first, slots))
            if self.has_states:
                self.states.enter(chunk)
            if self.window is not None:
                self.window_pages.enter(chunk, window)
        self.drafted = {chunk.slot: self._draft(chunk) for chunk in plan.chunks if chunk.awaits_drafts}
        if self.drafted:
            plan = self.plans[-1] = replace(plan, chunks=tuple(map(self._with_drafts, plan.chunks)))
        contexts = self._compute(plan)
        self.pages.device |= landing
        beside.device |= landing_beside
        return FakeForward(contexts, tuple(self.drafted.values()))

    def sample(self, forward: FakeForward, masks: Masks) -> StepResult:
        assert self.unsampled
        self.unsampled = False
        drawn = [self.write(context, masks.get(row)) for row, (_, context) in enumerate(forward.contexts)]
        samples = [
            chunk.sample
            for chunk in self.plans[-1].chunks
            if chunk.sample is not None
            for _ in range(1 + chunk.num_drafts)
        ]
        tokens = [
            token if sample.forced is None else sample.forced for token, sample in zip(drawn, samples, strict=True)
        ]
        self.last |= {slot: token for (slot, _), token in zip(forward.contexts, tokens, strict=True)}
        return StepResult(tuple(tokens), 0.0, drafts=self._drafts_behind(forward.contexts, tokens))

    def submit(self, plan: StepPlan) -> StepResult:
        """Both phases of a plan without constrained rows."""
        return self.sample(self.forward(plan), {})

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def _drafts_behind(self, forward: list[tuple[int, list[int]]], tokens: list[int]) -> tuple[tuple[int, ...], ...]:
        """What a layer drafts behind the draws of every sampled chunk that count."""
        plan, drafts, place = self.plans[-1], list[tuple[int, ...]](), 0
        for chunk in plan.chunks if plan.draft and plan.draft.drafts else ():
            if chunk.sample is not None:
                drawn = tuple(tokens[place : place + 1 + chunk.num_drafts])
                last = kept(chunk.drafts, drawn) - 1
                drafts.append(self._guessed([*forward[place + last][1], drawn[last]], MOST_DRAFTS))
                place += len(drawn)
        return tuple(drafts)

    def _draft(self, chunk: Chunk) -> tuple[int, ...]:
        return self._guessed([*self.pages.read(chunk.slot, 0, chunk.start), *chunk.before_drafts], chunk.num_drafts)

    def _guessed(self, context: list[int], number: int) -> tuple[int, ...]:
        for _ in range(number):
            likely = self.draft(context, None)
            context.append(likely if next_token(context) % 3 else (likely + 1) % VOCAB)
        return tuple(context[-number:])

    def _with_drafts(self, chunk: Chunk) -> Chunk:
        drafts = self.drafted.get(chunk.slot, chunk.drafts)
        return chunk._replace(tokens=(*chunk.tokens[: len(chunk.tokens) - len(drafts)], *drafts))

    def _compute(self, plan: StepPlan) -> list[tuple[int, list[int]]]:
        assert plan.num_tokens <= plan.bucket
        assert not plan.chunks or plan.bucket in self.buckets
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:  # all rows are written before any is read, as in a layer, in any order
            tokens = (self.last[chunk.slot],) if chunk.tokens == (FROM_DEVICE,) else chunk.tokens
            for position, token in enumerate(tokens, start=chunk.start):
                self.pages.write(chunk.slot, position, token)
                if self.window is not None:
                    self.window_pages.write(chunk.slot, position, token)
        if self.has_states:
            self.states.compute([(c, self.pages.read(c.slot, 0, c.start + len(c.before_drafts))) for c in plan.chunks])
        contexts = []
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            if self.window is not None:
                seen = max(0, chunk.start - self.window + 1)
                assert self.window_pages.read(chunk.slot, seen, end) == self.pages.read(chunk.slot, seen, end)
            if chunk.sample is None:
                continue
            assert not chunk.num_drafts or chunk.sample.forced is None
            context = self.pages.read(chunk.slot, 0, end)
            slot = -1 if chunk.num_drafts else chunk.slot  # rows with drafts leave the slot's last token as it is
            contexts += [(slot, context[:length]) for length in range(end - chunk.num_drafts, end + 1)]
        return contexts
