"""A plan while the scheduler makes it, the finished plan with its sequences, and the counters of all plans."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from jinfercept.kv.page import PageCopies
from jinfercept.sched.plan import FROM_DRAFT_MODEL, Chunk, DraftPlan, StepPlan, WindowCopies
from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence


@final
class MoveOrder:
    """A policy's order of eviction, as far as it was not used up."""

    __slots__ = ("_moves", "_rest")

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves, self._rest = iter(moves), list[Move]()

    def put_back(self, move: Move) -> None:
        """The move is not executed to its end: it comes next again."""
        self._rest.append(move)

    def __iter__(self) -> Iterator[Move]:
        return self

    def __next__(self) -> Move:
        return self._rest.pop() if self._rest else next(self._moves)


class HostVictims(NamedTuple):
    """The order of eviction from the host for copies of a sequence."""

    sequence: Sequence
    order: MoveOrder


@dataclass(slots=True)
class PlanBuilder:
    """A plan while the scheduler makes it; mutable.

    Attributes:
        now: when it is made, in seconds of the engine's clock.
        link_tokens: tokens of KV that the host link can still move.
        bucket_tokens: query tokens of the largest bucket.
        context_tokens: context of the running sequences.
        tenants_compete: sequences of several tenants run or wait.
        query_tokens: query tokens that the largest bucket can still take.
        stalled: a running sequence lacks a device slot, so that none starts any more.
        chunks: the query tokens, with their sequences.
        recomputing: sequences with a chunk that was computed before, at least in part.
        recomputed: how many query tokens that were.
        victims: the policy's order of eviction from the device; None: it was not asked for yet.
        host_victims: that from the host, for the sequence whose copies needed slots last.
        drafted: query tokens that are drafts.
        offloading: whose page was offloaded last.
        window_offload, window_fetch: pages of layers with windows, where these have pages of their own.
        draft: see `StepPlan`.
    """

    now: float
    link_tokens: int
    bucket_tokens: int
    context_tokens: int
    tenants_compete: bool
    query_tokens: int
    stalled: bool = False
    chunks: list[tuple[Sequence, Chunk]] = field(default_factory=list)
    offload: PageCopies = field(default_factory=PageCopies)
    fetch: PageCopies = field(default_factory=PageCopies)
    recomputing: list[Sequence] = field(default_factory=list)
    recomputed: int = 0
    victims: MoveOrder | None = None
    host_victims: HostVictims | None = None
    drafted: int = 0
    offloading: Sequence | None = None
    window_offload: PageCopies = field(default_factory=PageCopies)
    window_fetch: PageCopies = field(default_factory=PageCopies)
    draft: DraftPlan | None = None

    def add_offload(self, sequence: Sequence, copies: PageCopies) -> None:
        """Offload pages of a sequence; pages of one sequence in a row are of one context."""
        number = (self.offload.contexts[-1] if self.offload else 0) + (sequence is not self.offloading)
        self.offload.add(copies.device, copies.host, number)
        self.offloading = sequence

    def build(
        self, number: int, bucket: int, drop: tuple[int, ...], window_drop: tuple[int, ...] = ()
    ) -> "PlannedStep":
        """The plan, decoding chunks first.

        Args:
            number: plans that were made before.
            bucket: query tokens of the executable that runs it.
            drop, window_drop: host slots whose arrays are freed.
        """
        if len(self.chunks) < self.bucket_tokens - self.query_tokens:
            self.chunks.sort(key=lambda entry: len(entry[1].tokens) > 1)
        plan = StepPlan(
            number=number,
            bucket=bucket,
            chunks=tuple([chunk for _, chunk in self.chunks]),
            offload=self.offload or (),
            fetch=self.fetch or (),
            drop=drop,
            window=WindowCopies(self.window_offload, self.window_fetch, window_drop)
            if self.window_offload or self.window_fetch or window_drop
            else None,
            draft=self.draft,
        )
        sampled, scored, noted = list[Row](), list[Row](), list[NotedChunk]()
        num_tokens = num_draws = 0
        for sequence, chunk in self.chunks:
            if chunk.sample is not None:
                sampled.append(Row(sequence, sequence.epoch, num_draws, chunk.drafts if chunk.num_drafts else ()))
                num_draws += 1 + chunk.num_drafts
            if chunk.score:
                scored.append(Row(sequence, sequence.epoch, len(scored)))
            if sequence.noted_from is not None:
                noted.append(NotedChunk(sequence, chunk.start, num_tokens, len(chunk.tokens)))
            num_tokens += len(chunk.tokens)
        return PlannedStep(
            plan,
            tuple(sampled),
            tuple(self.recomputing),
            self.recomputed,
            scored=tuple(scored),
            has_drafts=self.drafted > 0,
            noted=tuple(noted),
        )


class Row(NamedTuple):
    """What a step's result has for one chunk.

    Attributes:
        epoch: of the sequence when the plan was made: the row is void if the sequence has another one by now.
        place: of the chunk's first token among those that the plan draws, or of its scores among the plan's.
        drafts: of the chunk; a token is drawn in the place of each, and one more.
    """

    sequence: Sequence
    epoch: int
    place: int
    drafts: tuple[int, ...] = ()


class NotedChunk(NamedTuple):
    """A chunk of a sequence whose experts are reported.

    Attributes:
        start: position of its first token in the sequence.
        place: of this token among the plan's query tokens.
    """

    sequence: Sequence
    start: int
    place: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the sequences that its result is for.

    Attributes:
        sampled: of every sampled chunk.
        recomputing: sequences with a chunk that was computed before, at least in part.
        recomputed_tokens: how many of the plan's query tokens that were.
        scored: of every chunk with a score.
        has_drafts: whether a sampled chunk has drafts.
        noted: the chunks whose tokens' experts are reported.
    """

    plan: StepPlan
    sampled: tuple[Row, ...]
    recomputing: tuple[Sequence, ...]
    recomputed_tokens: int
    scored: tuple[Row, ...] = ()
    has_drafts: bool = False
    noted: tuple[NotedChunk, ...] = ()

    def with_drafts(self, drafts: Iterable[tuple[int, ...]]) -> "PlannedStep":
        """The same with the drafts that a draft model made, of every sampled chunk that awaited some, in order."""
        rest = iter(drafts)
        rows = [
            row._replace(drafts=next(rest)) if row.drafts[-1:] == (FROM_DRAFT_MODEL,) else row for row in self.sampled
        ]
        return replace(self, sampled=tuple(rows))


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made: plans, preemptions, interceptions and chunks with drafts; the others are tokens.

    `returned` are the tokens that contexts had computed whose calls have returned, and `kept` those of them whose KV are on the
    device or on the host then. `drafts` are chunks with drafts, `drafted` the tokens that were drafted, and `accepted` those of
    them that became tokens of their sequences, by their place among the chunk's drafts.
    """

    plans: int = 0
    computed: int = 0
    recomputed: int = 0
    copied_out: int = 0
    copied_in: int = 0
    preemptions: int = 0
    interceptions: int = 0
    returned: int = 0
    kept: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def copy_out(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of a sequence that the plan copies to the host."""
        self.copied_out += tokens
        sequence.usage.copied_out += tokens

    def copy_in(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of a sequence that the plan fetches from the host."""
        self.copied_in += tokens
        sequence.usage.copied_in += tokens

    def recompute(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of a sequence that the plan computes again."""
        self.recomputed += tokens
        sequence.usage.recomputed += tokens

    def preempt(self, sequence: Sequence) -> None:
        """Count a preemption."""
        self.preemptions += 1
        sequence.usage.preemptions += 1
