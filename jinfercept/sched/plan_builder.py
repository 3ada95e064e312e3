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
    """The rest of a policy's order of eviction."""

    __slots__ = ("_moves", "_rest")

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves, self._rest = iter(moves), list[Move]()

    def put_back(self, move: Move) -> None:
        # it is not executed to its end, and comes next again
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
    """A plan while the scheduler makes it."""

    now: float  # seconds of the engine's clock
    link_tokens: int  # tokens of KV that the host link can still move
    bucket_tokens: int  # query tokens of the largest bucket
    context_tokens: int  # tokens in the contexts of running sequences
    tenants_compete: bool  # sequences of several tenants run or wait
    query_tokens: int  # query tokens that the largest bucket can still take
    stalled: bool = False  # a running sequence lacks a device slot, so that no other one starts
    chunks: list[tuple[Sequence, Chunk]] = field(default_factory=list)
    offload: PageCopies = field(default_factory=PageCopies)
    fetch: PageCopies = field(default_factory=PageCopies)
    recomputing: list[Sequence] = field(default_factory=list)  # those with a chunk partly computed before
    recomputed: int = 0  # query tokens that were computed before
    # the policy's orders of eviction; None: not asked for yet. That from the host is for the sequence whose copies needed
    # slots last.
    victims: MoveOrder | None = None
    host_victims: HostVictims | None = None
    drafted: int = 0  # query tokens that are drafts
    offloading: Sequence | None = None  # the sequence whose page was offloaded last
    # pages of layers with windows, where these have pages of their own
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
        """The plan, numbered `number`, decoding chunks first. The host slots that it drops are freed."""
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
    """The place of one chunk's tokens or scores in a step's result."""

    sequence: Sequence
    epoch: int  # of the sequence when the plan was made; the row is void if it has changed since
    place: int  # of the chunk's first token among the plan's draws, or of its scores among the plan's scores
    drafts: tuple[int, ...] = ()  # a token is drawn in the place of each, and one more


class NotedChunk(NamedTuple):
    """A chunk of a sequence whose experts are reported."""

    sequence: Sequence
    start: int  # position of its first token in the sequence
    place: int  # of this token among the plan's query tokens
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the sequences that its result is for."""

    plan: StepPlan
    sampled: tuple[Row, ...]  # a row for every sampled chunk
    recomputing: tuple[Sequence, ...]  # those with a chunk partly computed before
    recomputed_tokens: int  # query tokens that were computed before
    scored: tuple[Row, ...] = ()  # a row for every chunk with a score
    has_drafts: bool = False
    noted: tuple[NotedChunk, ...] = ()  # chunks whose tokens' experts are reported

    def with_drafts(self, drafts: Iterable[tuple[int, ...]]) -> "PlannedStep":
        """The same step with the drafts that a draft model made for every sampled chunk that awaited some, in order."""
        rest = iter(drafts)
        rows = [
            row._replace(drafts=next(rest)) if row.drafts[-1:] == (FROM_DRAFT_MODEL,) else row for row in self.sampled
        ]
        return replace(self, sampled=tuple(rows))


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made; fields without another noun are tokens."""

    plans: int = 0
    computed: int = 0
    recomputed: int = 0
    copied_out: int = 0  # from the device to the host
    copied_in: int = 0  # from the host to the device
    preemptions: int = 0
    interceptions: int = 0
    returned: int = 0  # computed tokens of contexts whose calls have returned
    kept: int = 0  # those of them whose KV was on the device or on the host then
    drafts: int = 0  # chunks with drafts
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # drafts that became tokens, by their place in the chunk

    def copy_out(self, sequence: Sequence, tokens: int) -> None:
        self.copied_out += tokens
        sequence.usage.copied_out += tokens

    def copy_in(self, sequence: Sequence, tokens: int) -> None:
        self.copied_in += tokens
        sequence.usage.copied_in += tokens

    def recompute(self, sequence: Sequence, tokens: int) -> None:
        self.recomputed += tokens
        sequence.usage.recomputed += tokens

    def preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.usage.preemptions += 1
