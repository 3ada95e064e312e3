"""What a new request waits behind: the running and the waiting sequences, the free memory, and what a run takes on average.

A *run* of a sequence lasts from when it starts until it pauses for a call or ends; a preemption does not end it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.sequence import Sequence as SchedulerSequence

_MEMORY = 256
"""Runs over which the means are taken: older ones count ever less."""
_PRIOR_RUN_TOKENS = 64.0
"""Tokens that a run generates, until one has ended."""


class MeanRun(NamedTuple):
    """Means over the latest runs.

    Attributes:
        generated: tokens that a run generates.
        computed: query tokens with which a run starts: its prompt, or what its call returned.
        new: share of the runs that are the first of their request.
    """

    generated: float = _PRIOR_RUN_TOKENS
    computed: float = 0.0
    new: float = 1.0


@final
class RunMeans:
    """Counts the runs of one scheduler.

    Attributes:
        mean_run: the means; replaced, never changed, so that any thread may read them.
    """

    def __init__(self) -> None:
        self.mean_run = MeanRun()
        self._started = self._ended = 0
        self._open: dict[str, int] = {}  # tokens that the sequences in a run had generated when it began

    def start(self, sequence: SchedulerSequence) -> None:
        """A sequence starts: a run begins, unless the sequence was preempted in one."""
        if sequence.id in self._open:
            return
        self._open[sequence.id] = sequence.generated
        self._started += 1
        share, old = max(1 / self._started, 1 / _MEMORY), self.mean_run
        computed, new = max(1, sequence.length - sequence.context.ready), not sequence.generated
        self.mean_run = old._replace(
            computed=old.computed + share * (computed - old.computed), new=old.new + share * (new - old.new)
        )

    def end(self, sequence: SchedulerSequence) -> None:
        """A sequence pauses or ends: its run is over, if it is in one."""
        begun = self._open.pop(sequence.id, None)
        if begun is None:
            return
        generated = sequence.generated - begun
        self._ended += 1
        share, old = max(1 / self._ended, 1 / _MEMORY), self.mean_run
        self.mean_run = old._replace(generated=old.generated + share * (generated - old.generated))


class QueuedWork(NamedTuple):
    """A request that waits, or that asks to.

    Attributes:
        priority: smaller ones go first.
        num_tokens: tokens of its context, for which it needs device memory.
        uncomputed: those of them that have to be computed.
    """

    tenant: str
    weight: float
    priority: int
    num_tokens: int
    uncomputed: int


class EngineLoad(NamedTuple):
    """An engine at one moment.

    Attributes:
        num_running: sequences that run.
        running_tokens: tokens of their contexts.
        running_uncomputed: those of them that have still to be computed.
        running_by_tenant: tokens of the running contexts of each tenant, each over its weight, and the number of them.
        free_tokens: tokens of device memory that a new sequence may take.
        free_slots: sequences that may start.
        queued: the waiting sequences, in order of arrival.
        means: of the latest runs.
    """

    num_running: int
    running_tokens: int
    running_uncomputed: int
    running_by_tenant: dict[str, tuple[float, int]]
    free_tokens: int
    free_slots: int
    queued: Sequence[QueuedWork]
    means: MeanRun


def read_load(
    kv: KVManager,
    running: Sequence[SchedulerSequence],
    waiting: Iterable[SchedulerSequence],
    arriving: Iterable[QueuedWork],
    max_num_seqs: int,
    means: MeanRun,
    *,
    protects_paused: bool,
) -> EngineLoad:
    """The load of one scheduler. From any thread: of a step that is being planned it may see a part.

    Args:
        kv: its pages.
        running, waiting: copies of its queues.
        arriving: requests that the scheduler has not seen.
        max_num_seqs: sequences that may run at once.
        means: of its runs.
        protects_paused: no page of a paused context is taken while a sequence runs.
    """
    by_tenant = dict[str, tuple[float, int]]()
    tokens = uncomputed = 0
    for sequence in running:
        length = sequence.length
        tokens += length
        uncomputed += max(0, length - sequence.context.ready - 1)
        before, count = by_tenant.get(sequence.tenant, (0.0, 0))
        by_tenant[sequence.tenant] = before + length / sequence.weight, count + 1
    free = kv.num_available + (0 if protects_paused else kv.num_paused)
    return EngineLoad(
        len(running),
        tokens,
        uncomputed,
        by_tenant,
        max(0, (free - len(running)) * kv.page_size - uncomputed),
        max_num_seqs - len(running),
        [*(_queued(sequence) for sequence in waiting), *arriving],
        means,
    )


def _queued(sequence: SchedulerSequence) -> QueuedWork:
    length = sequence.length
    return QueuedWork(
        sequence.tenant, sequence.weight, sequence.priority, length, max(1, length - sequence.max_computed)
    )
