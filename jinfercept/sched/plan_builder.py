"""A plan while the scheduler makes it, and what is remembered of it until its result arrives."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jinfercept.kv.store import PageCopy
from jinfercept.sched.plan import Chunk, StepPlan
from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making.

    Attributes:
        link_tokens: what the host link can still move.
        room: query tokens that the largest bucket can still take.
        context_tokens: context of the running sequences.
        now: when it is made.
        victims: the policy's order of loss, as far as it was used up.
        host_victims: the same on the host, and for the sake of whom.
    """

    link_tokens: int
    room: int
    context_tokens: int
    now: float
    chunks: list[tuple[Sequence, Chunk]] = field(default_factory=list)
    offload: list[PageCopy] = field(default_factory=list)
    fetch: list[PageCopy] = field(default_factory=list)
    recomputing: list[Sequence] = field(default_factory=list)
    recomputed: int = 0
    victims: Iterator[Move] | None = None
    host_victims: tuple[Sequence, Iterator[Move]] | None = None

    def seal(self, number: int, bucket: int, drop: tuple[int, ...]) -> "Planned":
        """The plan, decoding rows first.

        Args:
            number: of plans that were made before.
            bucket: query tokens of the executable that runs it.
            drop: host slots that are free.
        """
        self.chunks.sort(key=_is_long)
        plan = StepPlan(
            number=number,
            bucket=bucket,
            chunks=tuple(chunk for _, chunk in self.chunks),
            offload=tuple(self.offload),
            fetch=tuple(self.fetch),
            scatter=tuple(self.fetch),
            drop=drop,
        )
        sampled = tuple([(sequence, sequence.epoch) for sequence, chunk in self.chunks if chunk.sample])
        scored = tuple([(sequence, sequence.epoch) for sequence, chunk in self.chunks if chunk.score])
        return Planned(plan, sampled, tuple(self.recomputing), self.recomputed, scored)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the scheduler has to know when the result arrives.

    Attributes:
        sampled: the sequences of the sampled chunks, with the epoch that the sample is for.
        recomputing: the sequences whose chunks were computed before, at least in part.
        recomputed_tokens: how many of the plan's query tokens that were.
        scored: the sequences of the chunks with scores, likewise.
    """

    plan: StepPlan
    sampled: tuple[tuple[Sequence, int], ...]
    recomputing: tuple[Sequence, ...]
    recomputed_tokens: int
    scored: tuple[tuple[Sequence, int], ...] = ()


def _is_long(entry: tuple[Sequence, Chunk]) -> bool:
    return len(entry[1].tokens) > 1


@dataclass(slots=True)
class Counters:
    """What a scheduler has done since it began; tokens unless the name says otherwise."""

    plans: int = 0
    computed: int = 0
    recomputed: int = 0
    copied_out: int = 0
    copied_in: int = 0
    preemptions: int = 0
    interceptions: int = 0
