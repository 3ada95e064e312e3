"""Moves pages while a plan is built: a policy's moves, and the evictions that free slots. Counts them; runs nothing.

A device slot comes from the free ones; else from a finished prefix; else from a paused context, in the policy's order; else
from a preempted one; at last from the running sequence that is served last. A transfer goes as far as the page, the link and
the pools allow.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

from jinfercept.kv.context import Context, PageRun, bounds
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.sched.plan_builder import HostVictims, MoveOrder, PlanBuilder, SchedulerCounters
from jinfercept.sched.policy import Action, Budget, Move, Mover, Observer, Policy
from jinfercept.sched.profile import CostModel
from jinfercept.sched.queues import FairShare, Queues
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

    def victims(self) -> Iterator[tuple[Move, int]]:
        """Evictions of the preempted sequences, the youngest first, tail first. Each comes with the least number of pages
        that leave together."""
        for preempted in self._waiting:
            if preempted.waits:
                sequence, action = preempted.sequence, preempted.action
                together = pages_per_copy(self._cost, self._page_size) if action is Action.SWAP else 1
                yield Move(sequence, sequence.context.tail_first, action, "preempted"), together


class MovedSlots(NamedTuple):
    """The device slots that a move has freed, and its pages that were not reached."""

    freed: int
    rest: range


@final
class Transfers:
    """The page transfers and the evictions of the plan being built."""

    def __init__(
        self,
        kv: KVManager,
        queues: Queues,
        fair: FairShare,
        policy: Policy,
        counters: SchedulerCounters,
        preempted: PreemptedSequences,
    ) -> None:
        self._kv, self._queues, self._fair = kv, queues, fair
        self._policy, self._counters, self._preempted = policy, counters, preempted
        self.observer: Observer | None = None

    def move_paused(self, builder: PlanBuilder) -> None:
        """Let the policy move pages of paused contexts."""
        queries = builder.bucket_tokens - builder.query_tokens
        budget = Budget(
            builder.query_tokens, builder.link_tokens, builder.context_tokens, queries, self._kv.occupancy()
        )
        self._policy.moves(budget, builder.now, PlanMover(self, builder))

    def room(self, builder: PlanBuilder) -> int:
        """Pages that the plan can still move, by the link's budget and by the device memory for transfers."""
        pages, most = builder.link_tokens // self._kv.page_size, self._kv.most_moved_pages
        if most is not None:
            pages = min(pages, most - self._num_moved(builder))
        return pages if pages > 0 else 0

    def fetch(self, builder: PlanBuilder, sequence: Sequence, most: int, pages: range | None = None) -> int:
        """Fetch a sequence's window, which counts as one page, and then its pages, as room and free slots allow.

        `pages` are indexes of some pages of a paused sequence; None: all pages of a running one.
        """
        context, num_windows, side = sequence.context, 0, self._kv.side_pool
        if side is not None and side.is_fetchable(context):
            window_copies = side.fetch(context)
            if window_copies is None:
                return 0
            num_windows = 1
            builder.window_fetch.add(window_copies.device, window_copies.host)
            builder.link_tokens -= side.cost(len(window_copies))
        copies, num_tokens = self._kv.fetch(context, min(most - num_windows, self.room(builder)), pages)
        builder.fetch.add(copies.device, copies.host)
        builder.link_tokens -= len(copies) * self._kv.page_size
        self._counters.copy_in(sequence, num_tokens)
        return len(copies) + num_windows

    def move(self, builder: PlanBuilder, move: Move, most: int | None = None) -> "MovedSlots":
        """Execute a policy's move, page by page, as far as the pages allow, until `most` device slots are free (None: to its
        end)."""
        freed = num_passed = 0
        context = move.sequence.context
        if context.side is not None and move.action is Action.LOSE:
            pages, most = range(context.num_pages), None  # all or none
            move = move._replace(pages=pages if move.pages.step > 0 else pages[::-1])
        for run in context.runs(move.pages):
            pages = run.pages[:: move.pages.step]
            if most is not None and run.evictable:
                pages = pages[: most - freed]
            freed += self._move_alike(builder, Move(move.sequence, pages, move.action, move.why), run)
            num_passed += len(pages)
            if most is not None and freed >= most:
                break
        return MovedSlots(freed, move.pages[num_passed:])

    def force_out(self, builder: PlanBuilder, sequence: Sequence, action: Action) -> None:
        """Lose or swap every page that only this sequence refers to, whatever the link has left."""
        for run in reversed(sequence.context.runs()):
            if not run.shared:
                self.force(builder, Move(sequence, run.pages[::-1], action, "preempted"))

    def force(self, builder: PlanBuilder, move: Move, most: int | None = None) -> "MovedSlots":
        """Execute a move whatever the link has left; see `move`."""
        if move.action is Action.SWAP:
            num_pages = len(move.pages) if most is None else min(most, len(move.pages))
            builder.link_tokens = max(builder.link_tokens, num_pages * self._kv.page_size)
        return self.move(builder, move, most)

    def _move_alike(self, builder: PlanBuilder, move: Move, run: PageRun) -> int:
        pages, action = move.pages, move.action
        if run.residency is not Residency.DIRTY or not (
            action is Action.COPY or (action in (Action.SWAP, Action.OFFLOAD) and run.evictable)
        ):
            return self._drop(move, run) if action is not Action.COPY else 0
        if action is Action.COPY:
            self.copy(builder, move, run)
            return 0
        num_copied = self._offload(builder, move, run)
        freed = self._drop(move._replace(pages=pages[:num_copied]), run, copied=True)
        most = self._kv.most_moved_pages
        is_full = most is not None and self._num_moved(builder) >= most
        # pages that could not be copied are dropped; in a full plan they stay
        if action is Action.SWAP and num_copied < len(pages) and not is_full:
            freed += self._drop(move._replace(pages=pages[num_copied:]), run)
        return freed

    def copy(self, builder: PlanBuilder, move: Move, run: PageRun) -> int:
        """Copy pages of one run to the host, as many of the first ones as possible; returns how many."""
        num_copied = self._offload(builder, move, run) if self.room(builder) else 0
        if num_copied:
            self._observe(move._replace(pages=move.pages[:num_copied]), run, copied=True, freed=0)
        return num_copied

    def _drop(self, move: Move, run: PageRun, *, copied: bool = False) -> int:
        action, context = move.action, move.sequence.context
        if not move.pages:
            return 0
        freed = self._kv.drop(
            context,
            move.pages,
            device=action is not Action.UNCOPY,
            host=action is Action.LOSE or action is Action.UNCOPY,
        )
        if copied or freed:
            self._observe(move, run, copied=copied, freed=freed)
        return freed

    def _observe(self, move: Move, run: PageRun, *, copied: bool, freed: int) -> None:
        if self.observer is not None:
            first, last = bounds(move.pages)
            behind = run.start + run.num_pages - last  # all but the last page of a context are full
            lacking = run.num_pages * self._kv.page_size - run.num_tokens if not behind else 0
            num_tokens = len(move.pages) * self._kv.page_size - lacking
            part = run._replace(start=first, num_pages=len(move.pages), num_tokens=num_tokens)
            self.observer.moved(move, part, num_tokens if copied else 0, freed)

    def _offload(self, builder: PlanBuilder, move: Move, run: PageRun) -> int:
        kv, num_pages = self._kv, min(self._offloadable(builder, move), self.room(builder))
        if num_pages and kv.num_host_free < num_pages:
            self._free_host(builder, move.sequence, num_pages)
        copies, num_tokens = kv.copy_out(move.sequence.context, move.pages, min(num_pages, kv.num_host_free))
        if copies:
            builder.add_offload(move.sequence, copies)
            builder.link_tokens -= len(copies) * kv.page_size
            self._counters.copy_out(move.sequence, num_tokens)
        return len(copies)

    def _offloadable(self, builder: PlanBuilder, move: Move) -> int:
        context, side = move.sequence.context, self._kv.side_pool
        # a window leaves with the last page of its context
        if side is not None and not context.in_use and context.num_pages - 1 in move.pages and self.room(builder):
            copies = side.copy_out(context, context.num_tokens)
            if copies is None:
                return move.pages.index(context.num_pages - 1)
            offload = builder.window_offload
            offload.add(copies.device, copies.host, offload.contexts[-1] + 1 if offload else 0)
            builder.link_tokens -= side.cost(len(copies))
        return len(move.pages)

    def _num_moved(self, builder: PlanBuilder) -> int:
        # pages of windows count as many as have their memory
        side, num_pages = self._kv.side_pool, len(builder.fetch) + len(builder.offload)
        if side is not None:
            num_pages -= -side.cost(len(builder.window_fetch) + len(builder.window_offload)) // self._kv.page_size
        return num_pages

    def _free_host(self, builder: PlanBuilder, sequence: Sequence, num_slots: int) -> None:
        if not self._kv.has_host:
            return
        if builder.host_victims is None or builder.host_victims.sequence is not sequence:
            moves = self._policy.host_victims(sequence, builder.now)
            builder.host_victims = HostVictims(sequence, MoveOrder(moves))
        self.free_host(builder.host_victims.order, num_slots)

    def free_host(self, victims: MoveOrder, num_slots: int) -> None:
        """Free host slots by a policy's order, until `num_slots` are free."""
        for move in victims:
            for run in move.sequence.context.runs(move.pages):
                if not run.shared and not run.in_flight and run.residency.on_host and move.action is not Action.COPY:
                    pages = run.pages[:: move.pages.step][: num_slots - self._kv.num_host_free]
                    self._drop(Move(move.sequence, pages, move.action, move.why), run)
                    if self._kv.num_host_free >= num_slots:
                        victims.put_back(move)
                        return

    # -- slots of the device ---------------------------------------------------------------------------------------

    def free_slot(self, builder: PlanBuilder, sequence: Sequence, most: int, position: int) -> bool:
        """Free a device slot for a running sequence, up to `most` if paused contexts have as many; False: it must wait."""
        # `position` is the sequence's first token to compute that has no page
        running, may_evict, context = self._queues.running, not self._policy.protects_paused, sequence.context
        if self._kv.free_slot(context, position) or (may_evict and self._evict(builder, most, context, position)):
            return True
        while running:
            last = self._fair.service_order()[-1] if builder.tenants_compete else running[-1]
            if last is sequence or last.planned:
                break
            self.preempt(builder, last)
            if self._kv.free_slot(context, position) or (may_evict and self._evict(builder, most, context, position)):
                return True
        if running[0] is sequence and not may_evict and self._evict(builder, most, context, position):
            return True
        builder.stalled = True
        return False

    def preempt(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Send a running sequence back to the waiting queue, and move its pages as `preemption` says."""
        self.set_aside(sequence, builder.now)
        builder.victims = None
        if self._preempted.how == "policy":
            self.move_paused(builder)
        elif self._preempted.how != "auto":
            action = Action.SWAP if self._preempted.how == "swap" else Action.LOSE
            self.force_out(builder, sequence, action)

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Send a running sequence back to the waiting queue; its pages stay and may be evicted."""
        self._queues.wait(sequence)
        self._kv.release(sequence.context)
        self._counters.preempt(sequence)
        if self._preempted.how == "auto":
            self._preempted.add(sequence)
        elif self._preempted.how == "policy":
            self._policy.pause(sequence, now)

    def _evict(self, builder: PlanBuilder, most: int, context: Context | None = None, position: int = 0) -> bool:
        if not self._kv.num_paused:
            return self._kv.evict_side(context, position) > 0
        if self._take(builder, most):
            return True
        builder.victims = MoveOrder(self._policy.victims(builder.now))
        if self._take(builder, most):
            return True
        for move, together in self._preempted.victims():
            if self.force(builder, move, max(most, together)).freed:
                return True
        return self._kv.evict_paused(most) > 0 or self._kv.evict_side(context, position) > 0

    def _take(self, builder: PlanBuilder, most: int) -> int:
        freed, victims = 0, builder.victims
        for move in victims or ():
            slots, rest = self.move(builder, move, most - freed)
            freed += slots
            if freed >= most:
                if rest and victims is not None:
                    victims.put_back(move._replace(pages=rest))
                break
        return freed


@final
class PlanMover(Mover):
    __slots__ = ("_builder", "_transfers")

    def __init__(self, transfers: Transfers, builder: PlanBuilder) -> None:
        self._transfers, self._builder = transfers, builder

    def copy(self, sequence: Sequence, why: str, pages: range | None = None) -> bool:
        context = sequence.context
        for run in context.runs(pages):
            if run.residency is Residency.DIRTY:
                dirty = run.pages[:: -1 if pages is not None and pages.step < 0 else 1]
                if self._transfers.copy(self._builder, Move(sequence, dirty, Action.COPY, why), run) < len(dirty):
                    return False
        return True

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        if action is Action.COPY:
            return self.copy(sequence, why, pages)
        context = sequence.context
        if pages is None:
            pages = range(context.num_pages)
        if action is Action.FETCH:
            self._transfers.fetch(self._builder, sequence, len(pages), pages)
            return not any(run.residency is Residency.HOST for run in context.runs(pages))
        self._transfers.move(self._builder, Move(sequence, pages, action, why))
        if action is Action.UNCOPY:
            return not any(run.residency.on_host for run in context.runs(pages))
        return not any(run.residency.on_device for run in context.runs(pages))
