"""Ours: copy paused contexts to the host while the link is idle, keep the device copy, evict pages only on demand.

A page with a host copy is clean: dropping it is free and instant. So paused contexts fill memory that would be idle, and give
it up at once when a sequence needs it. The context that takes the most seconds of holding per return is copied and evicted
first: one that is expected back late, or that may never come back; or one that waits to run, but behind others, since
much of it is gone.

Where the host is full, some pages are lost. Those go that are worth least by equation (6): the seconds of computing them again,
for each second that they are kept. Attention makes later tokens dearer, and the KV of a tail stays valid while its head is
computed again. So contexts lose their heads first, wherever they are, down to where their next tokens are worth as much as
those of contexts that are expected later; where computing costs the same everywhere, tails go first, which leaves prefixes to
share. A context that runs needs no host copy, nor does one that is expected soon and is on the device still: these copies give
way before any page is lost.

A new request does not displace a context that is expected back before it could be moved out and in again twice: where memory is
short, it would only make the link move that context while others wait for the link. Host copies that the link would bring
too late are recomputed (`Policy.recomputes_late`).
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple, final

from jinfercept.kv.context import Context, PageRun
from jinfercept.kv.page import Residency
from jinfercept.sched.cost import CostModel
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.position_price import PositionPrice
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.waste import recompute_worth, return_s

STALE = 64
"""Entries that the heap may have besides the two per sequence, before those that count for nothing any more go."""


class PageBlock(NamedTuple):
    """Pages of a paused context that go together, in the order in which they go.

    Attributes:
        worth: of a token of theirs, by equation (6).
    """

    worth: float
    sequence: Sequence
    pages: range


class _RankedBlock(NamedTuple):
    """Sorts sequences by what the block of each was worth when it was looked at, then in the order of their return."""

    worth: float
    rank: tuple[bool, float, int]
    number: int
    sequence_id: str


@final
class LeastWorth:
    """The least worthy blocks of paused sequences, one of each, in ascending order of their worth.

    The order is kept from plan to plan. Time only adds to the worth of a block, since its sequence's return comes nearer: what
    it was worth before is a lower bound, and only the first blocks are looked at again. A sequence whose pages or whose
    expected return have changed is to be `put` again.

    Args:
        paused: the sequences that may have blocks, in the order in which those of equal worth go.
        block_of: the block of a sequence that is worth least of those that it has at a time; None if it has none.
    """

    def __init__(self, paused: LastExpectedFirst, block_of: Callable[[Sequence, float], PageBlock | None]) -> None:
        self._paused, self._block_of = paused, block_of
        self._heap: list[_RankedBlock] = []
        self._entries: dict[str, tuple[_RankedBlock, Sequence]] = {}  # those that count, by the sequence's id
        self._skipped: list[tuple[_RankedBlock, Sequence]] = []
        self._changed: set[Sequence] = set()  # to be put when the order is read next
        self._numbers = count()

    def put_later(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences when the order is read next."""
        self._changed.update(sequences)

    def put(self, sequence: Sequence, now: float) -> None:
        """Look at a sequence: its block may be another one now."""
        self._changed.discard(sequence)
        block = self._block_of(sequence, now) if sequence in self._paused else None
        if block is None:
            self._entries.pop(sequence.id, None)
            return
        rank = self._paused.rank(sequence)
        entry, _ = self._entries.get(sequence.id, (None, None))
        if entry is None or entry.rank is not rank or entry.worth > block.worth:
            heapq.heappush(self._heap, self._enter(block, rank))

    def restart(self) -> None:
        """Begin a new order, in which no sequence is left out."""
        for entry, sequence in self._skipped:
            if sequence.id not in self._entries and sequence in self._paused:
                self._entries[sequence.id] = (entry, sequence)
                heapq.heappush(self._heap, entry)
        self._skipped.clear()
        if len(self._heap) > 2 * len(self._entries) + STALE:
            self._heap = [entry for entry, _ in self._entries.values()]
            heapq.heapify(self._heap)

    def first(self, now: float) -> PageBlock | None:
        """The block that is worth least; None if there is none. It stays the first until its pages go or it is skipped."""
        for sequence in list(self._changed):
            self.put(sequence, now)
        while self._heap:
            entry = self._heap[0]
            latest, sequence = self._entries.get(entry.sequence_id, (None, None))
            if latest is not entry or sequence is None:
                heapq.heappop(self._heap)
                continue
            block = self._block_of(sequence, now) if sequence in self._paused else None
            if block is None:
                heapq.heappop(self._heap)
                del self._entries[sequence.id]
            elif block.worth > entry.worth:
                heapq.heapreplace(self._heap, self._enter(block, entry.rank))
            else:
                return block
        return None

    def skip(self, sequence: Sequence, now: float) -> None:
        """Leave out a sequence until the next `restart`, or until it is put again."""
        if sequence in self._changed:
            self.put(sequence, now)
        entry = self._entries.pop(sequence.id, None)
        if entry is not None:
            self._skipped.append(entry)

    def _enter(self, block: PageBlock, rank: tuple[bool, float, int]) -> _RankedBlock:
        entry = _RankedBlock(block.worth, rank, next(self._numbers), block.sequence.id)
        self._entries[block.sequence.id] = (entry, block.sequence)
        return entry


HELD_SWAPS = 4.0
"""A context is held against new requests if it is expected within so many times the seconds of moving it one way. Measured:
from 1 to 8 differ by 3 % in latency, and without it latency is 1.3 times as high (13B at 8 requests per second)."""
LATE = 8.0
"""A context is held for so many times these seconds at most, however soon it is expected: tools hang."""
SOONEST = 64
"""Contexts that a plan looks at to hold them."""
REFUSALS = 3
"""Refused copies after which a plan stops trying: the link is used up."""
RESERVE = 16
"""One in so many device pages is kept clean where the host is full, so that evictions need not wait for the link."""
BLOCK_TOKENS = 1024
"""Tokens that a context loses before the worth of its next ones is compared again."""
FAR = 1 << 20
"""Tokens of a transfer that takes as long as its bytes do."""
SOON_S = 1e-3
"""Seconds within which a context is needed that waits to run."""


@final
class CopyAhead(Policy):
    """Spend the free link budget on copies of paused contexts; evict on demand.

    Args:
        estimator: expected seconds until an interception ends.
        cost: prices transfers and computing.
        chunk_tokens: tokens of a step that recomputes.
        page_size: tokens per page.
    """

    recomputes_late = True

    def __init__(self, estimator: Estimator, cost: CostModel, chunk_tokens: int, page_size: int) -> None:
        self._swap_s, self._price = cost.swap_s, PositionPrice(cost, chunk_tokens)
        self._disk_token_s, self._swap_token_s = cost.disk_s(FAR) / FAR, cost.swap_s(FAR) / FAR
        self._has_disk = self._disk_token_s < math.inf
        self._page_size, self._block = page_size, max(1, BLOCK_TOKENS // page_size)
        self._paused = LastExpectedFirst(estimator)
        self._dirty = LastExpectedFirst(estimator)  # may have pages on the device that have no host copy
        self._least_on_device = LeastWorth(self._paused, partial(self._cheapest, on_device=True))
        self._least_on_host = LeastWorth(self._paused, partial(self._cheapest, on_device=False))
        self._contexts: dict[Context, Sequence] = {}  # of the paused sequences
        self._changed: set[Context] = set()  # those of them whose blocks may be other ones than they were
        self._spared = math.inf  # worth from which host pages do not give way to the copy that is to be made

    def pause(self, sequence: Sequence, now: float) -> None:
        self._paused.add(sequence, now)
        self._dirty.add(sequence, now)
        self._contexts[sequence.context] = sequence
        self._changed.add(sequence.context)
        sequence.context.watch(self._changed)

    def wait(self, sequence: Sequence) -> None:
        for group in (self._paused, self._dirty):
            if sequence in group:
                group.add(sequence, 0.0)
        if sequence in self._paused:
            self._changed.add(sequence.context)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._paused.discard(sequence)
        self._dirty.discard(sequence)
        if self._contexts.pop(sequence.context, None) is not None:
            sequence.context.watch(None)
            self._changed.discard(sequence.context)
            for least in (self._least_on_device, self._least_on_host):
                least.put(sequence, now)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Copies, longest expected remaining first, tail first: into free host slots, and for the reserve of clean pages."""
        if not self._paused:  # as mostly: the other group has no other members
            return
        self._changed.update([sequence.context for sequence in self._paused.refresh(now)])
        self._dirty.refresh(now)
        pools = budget.pools
        room = max(pools.host_total - pools.host, pools.total // RESERVE - pools.paused_clean)
        self._spared, refused = -math.inf, 0
        for sequence in self._dirty if budget.link_tokens > 0 else ():
            for run in reversed(sequence.context.runs()):
                # A disk has contexts from their first page on, which running ones may share.
                is_free = run.evictable or (self._has_disk and not run.in_flight)
                if run.residency is not Residency.DIRTY or not is_free:
                    continue
                pages = run.pages[::-1][: max(0, room)]
                room -= run.num_pages
                if not pages or not mover.copy(sequence, "copy ahead", pages):
                    refused += 1
                    break
            else:
                self._dirty.discard(sequence)
            if room <= 0 or refused == REFUSALS:
                break
        self._spared = math.inf

    def victims(self, now: float) -> Iterator[Move]:
        """Pages of the sequence expected back last, tail first, if they are clean or can be copied now; for each that cannot
        be, pages that are worth least."""
        least: LeastWorth | None = None  # until it is needed
        for sequence in self._paused:
            context = sequence.context
            if not context.own_evictable:  # as mostly
                continue
            runs = context.own_evictable[::-1]
            for run in runs:
                if run.residency is Residency.CLEAN:
                    yield Move(sequence, run.pages[::-1], Action.DROP, "clean")
            for pages in (pages for run in runs if run.residency is Residency.DIRTY for pages in self._blocks(run)):
                least = least or self._in_order(self._least_on_device)
                block = least.first(now)
                self._spared = math.inf if block is None else block.worth
                yield Move(sequence, pages, Action.OFFLOAD, "a slot is needed")
                if block is not None and any(run.evictable for run in context.runs(pages)):
                    yield from self._lose(least, block, now)
        while least is not None and (block := least.first(now)) is not None:
            yield from self._lose(least, block, now)

    def _blocks(self, run: PageRun) -> Iterator[range]:
        """The pages of a run, tail first, in ranges of `BLOCK_TOKENS`."""
        pages = run.pages[::-1]
        return (pages[start : start + self._block] for start in range(0, len(pages), self._block))

    def _in_order(self, least: LeastWorth) -> LeastWorth:
        """The blocks of pages on the device or on the host, of all contexts as they are now."""
        changed = [sequence for context in self._changed if (sequence := self._contexts.get(context)) is not None]
        self._changed.clear()
        self._least_on_device.put_later(changed)
        self._least_on_host.put_later(changed)
        least.restart()
        return least

    def _lose(self, least: LeastWorth, block: PageBlock, now: float) -> Iterator[Move]:
        """Drop a block from the device, the first of its order."""
        yield Move(block.sequence, block.pages, Action.DROP, "worth least")
        if any(run.residency.on_device for run in block.sequence.context.runs(block.pages)):
            least.skip(block.sequence, now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Copies of contexts that are on the device and expected back before the sequence, soonest first; then pages that are
        worth less than those that would be lost on the device. Nothing gives way to copies ahead."""
        if self._spared < 0.0:
            return
        for paused in reversed(list(self._paused)):
            if paused is sequence:
                break
            for run in paused.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    self._dirty.add(paused, now)
                    yield Move(paused, run.pages, Action.UNCOPY, "on the device still")
        least = self._in_order(self._least_on_host)
        while (block := least.first(now)) is not None and block.worth < self._spared:
            yield Move(block.sequence, block.pages, Action.UNCOPY, "worth least")
            if any(run.residency.on_host for run in block.sequence.context.runs(block.pages)):
                least.skip(block.sequence, now)

    def held_pages(self, most: int, now: float) -> int:
        num_pages = 0
        for expected_s, sequence in self._paused.soonest(SOONEST):
            soon_s = HELD_SWAPS * self._swap_s(sequence.length)
            if soon_s < math.inf and expected_s - now <= soon_s and now - sequence.paused_s <= LATE * soon_s:
                num_pages += sum([run.num_pages for run in sequence.context.runs() if run.evictable])
                if num_pages >= most:
                    return most
        return num_pages

    def _token_s(self, sequence: Sequence, page: int) -> float:
        """Seconds that the return of a token of a lost page takes."""
        recompute_s = self._price.token_s(page * self._page_size)
        is_stored = page < sequence.context.num_stored
        return return_s(recompute_s, self._disk_token_s, self._swap_token_s) if is_stored else recompute_s

    def _cheapest(self, sequence: Sequence, now: float, *, on_device: bool) -> PageBlock | None:
        """The pages of a paused sequence that are worth least of those on the device, or of those only on the host."""
        runs = sequence.context.own_evictable if on_device else sequence.context.own_hosted
        if not runs:
            return None
        wait_s = max(SOON_S, self._paused.expected_s(sequence) - now)
        if state_tokens := sequence.context.state_tokens:  # all of the context goes, or none
            num_tokens = sum([run.num_tokens for run in runs])
            token_s = self._price.between_s(0, num_tokens) / (num_tokens + state_tokens)
            return PageBlock(recompute_worth(token_s, wait_s), sequence, sequence.context.tail_first)
        head, tail = runs[0].pages, runs[-1].pages[::-1]
        head_s, tail_s = (self._token_s(sequence, pages[0]) for pages in (head, tail))
        token_s, pages = (head_s, head) if head_s < tail_s else (tail_s, tail)
        return PageBlock(recompute_worth(token_s, wait_s), sequence, pages[: self._block])
