"""Adds page transfers to a plan, as far as the page, the link and the pools allow, and counts them. Chooses no page."""

from collections.abc import Iterable
from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Page, Residency
from jinfercept.sched.observer import Observer
from jinfercept.sched.plan_builder import PlanBuilder, SchedulerCounters
from jinfercept.sched.policy import Action, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence


@final
class Transfers:
    """Turns a policy's moves into page transfers of the plan being built.

    Args:
        kv: the pages.
        policy: the order of eviction from the host.
        counters: moved tokens are added here.
        observer: called with every move that had an effect.
    """

    def __init__(
        self, kv: KVManager, policy: Policy, counters: SchedulerCounters, observer: Observer | None = None
    ) -> None:
        self._kv = kv
        self._policy = policy
        self._counters = counters
        self._observer = observer

    def room(self, builder: PlanBuilder) -> int:
        """Pages that the plan can still move: as far as the link's budget goes, and the device memory for transfers."""
        pages, most = builder.link_tokens // self._kv.page_size, self._kv.most_moved_pages
        if most is not None:
            pages = min(pages, most - len(builder.fetch) - len(builder.offload))
        return pages if pages > 0 else 0

    def fetch(self, builder: PlanBuilder, sequence: Sequence, most: int) -> int:
        """Fetch up to `most` pages of a running sequence, as far as the plan's room and the free slots go; returns how many."""
        copies, num_tokens = self._kv.fetch(sequence.context, min(most, self.room(builder)))
        builder.fetch += copies
        builder.link_tokens -= len(copies) * self._kv.page_size
        self._counters.copy_in(sequence, num_tokens)
        return len(copies)

    def move(self, builder: PlanBuilder, move: Move) -> bool:
        """Execute a policy's move as far as the page allows; True if its device slot is free now.

        A full plan swaps no dirty page: the page stays on the device for a later plan.
        """
        kv, page, action = self._kv, move.page, move.action
        if action is Action.SWAP and self._is_full(builder) and kv.can_copy_out(page):
            return False
        copies = action is Action.COPY or (action is Action.SWAP and not page.refs)
        copied, freed = self._offload(builder, move) if copies else 0, False
        if action is not Action.COPY:
            freed = kv.drop(page, device=action is not Action.UNCOPY, host=action in (Action.LOSE, Action.UNCOPY))
        if self._observer is not None and (copied or freed):
            self._observer.moved(move, copied, freed)
        return freed

    def force_out(self, builder: PlanBuilder, sequence: Sequence, action: Action) -> None:
        """Lose or swap every page that only this sequence refers to, whatever the link has left."""
        for page in reversed(sequence.context.pages):
            if page.evictable_refs == 1 and not page.refs:
                if action is Action.SWAP:
                    builder.link_tokens = max(builder.link_tokens, self._kv.page_size)
                self.move(builder, Move(sequence, page, action, "preempted"))

    def _offload(self, builder: PlanBuilder, move: Move) -> int:
        """Offload the page of a move, if possible; returns the tokens that the link moves for it."""
        page, kv = move.page, self._kv
        if not self.room(builder) or not kv.can_copy_out(page):
            return 0
        if not kv.num_host_free and not self._free_host(builder, move.sequence):
            return 0
        copy = kv.copy_out(page)
        assert copy is not None
        builder.add_offload(move.sequence, copy)
        builder.link_tokens -= self._kv.page_size
        self._counters.copy_out(move.sequence, page.filled)
        return page.filled

    def _is_full(self, builder: PlanBuilder) -> bool:
        most = self._kv.most_moved_pages
        return most is not None and len(builder.fetch) + len(builder.offload) >= most

    def _free_host(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Make sure that a host slot is free for the sequence's copies; False if the policy evicts no other copy for them."""
        if not self._kv.has_host:
            return False
        if builder.host_victims is None or builder.host_victims[0] is not sequence:
            builder.host_victims = sequence, self._policy.host_victims(sequence, builder.now)
        for move in builder.host_victims[1]:
            page = move.page
            if not page.offloading and not page.refs and page.evictable_refs == 1:
                self.move(builder, move)
            if self._kv.num_host_free:
                return True
        return False


@final
class PlanMover(Mover):
    """Moves pages within one plan.

    Args:
        transfers: executes moves.
        builder: the plan.
    """

    __slots__ = ("_builder", "_transfers")

    def __init__(self, transfers: Transfers, builder: PlanBuilder) -> None:
        self._transfers, self._builder = transfers, builder

    def copy(self, sequence: Sequence, why: str, pages: Iterable[Page] | None = None) -> bool:
        if pages is None:
            pages = (page for page in sequence.context.pages if page.residency is Residency.DIRTY)
        transfers, builder = self._transfers, self._builder
        for page in pages:
            if page.host is None:
                if transfers.room(builder):
                    transfers.move(builder, Move(sequence, page, Action.COPY, why))
                if page.host is None:
                    return False
        return True

    def move(self, sequence: Sequence, action: Action, why: str, pages: Iterable[Page] | None = None) -> bool:
        if action is Action.COPY:
            return self.copy(sequence, why, pages)
        moved = True
        for page in sequence.context.pages if pages is None else pages:
            self._transfers.move(self._builder, Move(sequence, page, action, why))
            moved = moved and (page.host if action is Action.UNCOPY else page.device) is None
        return moved
