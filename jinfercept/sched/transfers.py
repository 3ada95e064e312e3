"""Writes the moves of pages into a plan's draft, as far as page, link and pools allow, and counts them. Chooses nothing."""

from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Page
from jinfercept.sched.observer import Observer
from jinfercept.sched.plan_builder import Counters, PlanBuilder
from jinfercept.sched.policy import Action, Move, Policy
from jinfercept.sched.sequence import Sequence


@final
class Transfers:
    """The hands of the scheduler and its policy.

    Args:
        kv: the pages.
        policy: says what is lost while the host is full.
        counters: what was moved is added here.
        observer: told of every move that did something.
    """

    def __init__(self, kv: KVManager, policy: Policy, counters: Counters, observer: Observer | None = None) -> None:
        self._kv = kv
        self._policy = policy
        self._counters = counters
        self._observer = observer

    def may_move(self, draft: PlanBuilder) -> bool:
        """Whether the plan can carry one more page: the link has time for it, and the device memory on the way."""
        return draft.link_tokens >= self._kv.page_size and not self._is_full(draft)

    def fetch(self, draft: PlanBuilder, sequence: Sequence, page: Page) -> None:
        """Bring a host page back to a free slot; there must be one, and the plan must have room (`may_move`)."""
        draft.fetch.append(self._kv.store.fetch(page))
        draft.link_tokens -= self._kv.page_size
        sequence.copied_in += page.filled
        self._counters.copied_in += page.filled

    def move(self, draft: PlanBuilder, move: Move) -> bool:
        """Execute a policy's move as far as the page allows; True if its device slot is free now.

        A plan that is full swaps nothing more: what was not saved stays where it is, for a later plan.
        """
        kv, page, action = self._kv, move.page, move.action
        if action is Action.SWAP and self._is_full(draft) and kv.store.can_offload(page):
            return False
        copies = action is Action.COPY or (action is Action.SWAP and not page.refs)
        copied = self._copy_out(draft, move) if copies else 0
        uncopies = action in (Action.LOSE, Action.UNCOPY)
        if page.evictable_refs > 1 and (uncopies or page.host is None):
            return False  # what others wait for too goes last: see `PageStore.evict_paused`
        freed = action not in (Action.COPY, Action.UNCOPY) and kv.store.drop_device(page)
        if uncopies and page.host is not None and not page.refs:
            kv.store.drop_host(page)
        if self._observer is not None and (copied or freed):
            self._observer.moved(move, copied, freed)
        return freed

    def force_out(self, draft: PlanBuilder, sequence: Sequence, action: Action) -> None:
        """Lose or swap every page that only this sequence counts on, whatever the link has left."""
        for page in reversed(sequence.context.pages):
            if page.evictable_refs == 1 and not page.refs:
                if action is Action.SWAP:
                    draft.link_tokens = max(draft.link_tokens, self._kv.page_size)
                self.move(draft, Move(sequence, page, action, "preempted"))

    def _copy_out(self, draft: PlanBuilder, move: Move) -> int:
        """Tokens that the link takes to the host for this move."""
        page, store = move.page, self._kv.store
        if not self.may_move(draft) or not store.can_offload(page):
            return 0
        if not store.num_host_free and not self._free_host(draft, move.sequence):
            return 0
        copy = store.offload(page)
        assert copy is not None
        draft.offload.append(copy)
        draft.link_tokens -= self._kv.page_size
        move.sequence.copied_out += page.filled
        self._counters.copied_out += page.filled
        return page.filled

    def _is_full(self, draft: PlanBuilder) -> bool:
        most = self._kv.most_moved_pages
        return most is not None and len(draft.fetch) + len(draft.offload) >= most

    def _free_host(self, draft: PlanBuilder, sequence: Sequence) -> bool:
        """See to it that a host slot is free for the sequence's copies, at the cost of others, if the policy lets it."""
        store = self._kv.store
        if not store.num_host_pages:
            return False
        if draft.host_victims is None or draft.host_victims[0] is not sequence:
            draft.host_victims = sequence, self._policy.host_victims(sequence, draft.now)
        for move in draft.host_victims[1]:
            page = move.page
            if not page.offloading and not page.refs and page.evictable_refs == 1:
                self.move(draft, move)
            if store.num_host_free:
                return True
        return False
