"""How preempted sequences lose their pages, and which page is next. Evicts nothing itself."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

from jinfercept.sched.cost import CostModel
from jinfercept.sched.policy import Action, Move
from jinfercept.sched.sequence import Sequence, State

Preemption = Literal["auto", "policy", "recompute", "swap"]
"""What happens to a preempted sequence's pages. "auto": they stay until their slots are needed, and are then swapped or
recomputed, whichever the machine's profile prices lower. "policy": its choice, as for intercepted sequences. "recompute":
dropped at once. "swap": offloaded at once, whatever the link has left."""
MOST_PER_COPY = 64
"""Most pages that leave together with one whose slot is needed."""


def cheaper(cost: CostModel, num_tokens: int, chunk_tokens: int) -> Action:
    """`SWAP` if a context moves out and back in less time than steps of `chunk_tokens` recompute it, else `LOSE`."""
    swap_s, recompute_s = 2.0 * cost.swap_s(num_tokens), cost.recompute_s(num_tokens, chunk_tokens)
    return Action.SWAP if swap_s < recompute_s else Action.LOSE


def pages_per_copy(cost: CostModel, page_size: int) -> int:
    """The most pages whose bytes take no longer than the rest of a copy: they may leave with a page that has to."""
    # 0 if a copy is priced by its bytes alone: one page leaves
    copy_s = cost.copies_s(page_size)
    page_s = cost.swap_s(page_size) - copy_s
    pages = 1
    while pages * page_s <= copy_s == cost.copies_s((pages + 1) * page_size) and pages < MOST_PER_COPY:
        pages += 1
    return pages


class _Preempted(NamedTuple):
    sequence: Sequence
    preemptions: int
    paused_s: float
    action: Action

    @property
    def waits(self) -> bool:
        sequence = self.sequence
        # it has neither run nor paused since
        same = (sequence.preemptions, sequence.paused_s) == (self.preemptions, self.paused_s)
        return sequence.state is State.WAITING and same


class PreemptedVictim(NamedTuple):
    """An eviction of a preempted sequence's pages, and the least number of them that leave together."""

    move: Move
    together: int


@final
class PreemptedSequences:
    """The preempted sequences whose pages are lost as slots are needed. Without a host, pages cannot be offloaded."""

    def __init__(self, how: Preemption, cost: CostModel, chunk_tokens: int, page_size: int, *, has_host: bool) -> None:
        self.how: Preemption = how  # only with "auto" are sequences added
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._page_size = page_size
        self._has_host = has_host
        self._waiting: list[_Preempted] = []

    def add(self, sequence: Sequence) -> None:
        """Decide how the pages of a sequence that was preempted are lost."""
        action = Action.LOSE
        if self._has_host:
            action = cheaper(self._cost, sequence.context.ready, self._chunk_tokens)
        preempted = _Preempted(sequence, sequence.preemptions, sequence.paused_s, action)
        self._waiting = [other for other in self._waiting if other.waits and other.sequence is not sequence]
        self._waiting.append(preempted)
        self._waiting.sort(key=lambda preempted: -preempted.sequence.order)

    def victims(self) -> Iterator[PreemptedVictim]:
        """Evictions of the preempted sequences, the youngest first, tail first."""
        for preempted in self._waiting:
            if preempted.waits:
                sequence, action = preempted.sequence, preempted.action
                together = pages_per_copy(self._cost, self._page_size) if action is Action.SWAP else 1
                yield PreemptedVictim(Move(sequence, sequence.context.tail_first, action, "preempted"), together)
