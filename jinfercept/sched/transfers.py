"""Adds page transfers to a plan, as far as the page, the link and the pools allow, and counts them. Chooses no page."""

from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Page
from jinfercept.sched.observer import Observer
from jinfercept.sched.plan_builder import Counters, PlanBuilder
from jinfercept.sched.policy import Action, Move, Policy
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

    def __init__(self, kv: KVManager, policy: Policy, counters: Counters, observer: Observer | None = None) -> None:
        self._kv = kv
        self._policy = policy
        self._counters = counters
        self._observer = observer

    def may_move(self, builder: PlanBuilder) -> bool:
        """Whether the plan can move one more page: the link's budget holds it, and so does the device memory for transfers."""
        return builder.link_tokens >= self._kv.page_size and not self._is_full(builder)

    def fetch(self, builder: PlanBuilder, sequence: Sequence, page: Page) -> None:
        """Fetch a host page to a free device slot. There must be one, and the plan must take one more page (`may_move`)."""
        builder.fetch.append(self._kv.store.fetch(page))
        builder.link_tokens -= self._kv.page_size
        sequence.copied_in += page.filled
        self._counters.copied_in += page.filled

    def move(self, builder: PlanBuilder, move: Move) -> bool:
        """Execute a policy's move as far as the page allows; True if its device slot is free now.

        A full plan swaps no dirty page: the page stays on the device for a later plan.
        """
        kv, page, action = self._kv, move.page, move.action
        if action is Action.SWAP and self._is_full(builder) and kv.store.can_offload(page):
            return False
        copies = action is Action.COPY or (action is Action.SWAP and not page.refs)
        copied = self._offload(builder, move) if copies else 0
        uncopies = action in (Action.LOSE, Action.UNCOPY)
        if page.evictable_refs > 1 and (uncopies or page.host is None):
            return False  # pages that several contexts share are evicted last: see `PageStore.evict_paused`
        freed = action not in (Action.COPY, Action.UNCOPY) and kv.store.drop_device(page)
        if uncopies and page.host is not None and not page.refs:
            kv.store.drop_host(page)
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
        page, store = move.page, self._kv.store
        if not self.may_move(builder) or not store.can_offload(page):
            return 0
        if not store.num_host_free and not self._free_host(builder, move.sequence):
            return 0
        copy = store.offload(page)
        assert copy is not None
        builder.add_offload(move.sequence, copy)
        builder.link_tokens -= self._kv.page_size
        move.sequence.copied_out += page.filled
        self._counters.copied_out += page.filled
        return page.filled

    def _is_full(self, builder: PlanBuilder) -> bool:
        most = self._kv.most_moved_pages
        return most is not None and len(builder.fetch) + len(builder.offload) >= most

    def _free_host(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Make sure that a host slot is free for the sequence's copies; False if the policy evicts no other copy for them."""
        store = self._kv.store
        if not store.num_host_pages:
            return False
        if builder.host_victims is None or builder.host_victims[0] is not sequence:
            builder.host_victims = sequence, self._policy.host_victims(sequence, builder.now)
        for move in builder.host_victims[1]:
            page = move.page
            if not page.offloading and not page.refs and page.evictable_refs == 1:
                self.move(builder, move)
            if store.num_host_free:
                return True
        return False
