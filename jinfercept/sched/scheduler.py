"""Makes one `StepPlan` after another: who runs, who waits, who is paused, and what moves. Runs nothing, knows no text.

A plan is drafted in one pass: the running sequences in order of arrival, each with its one token or the next chunk of what
it lacks; then the waiting ones, first come first served, into what is left of the bucket; then the policy's moves for paused
contexts, into what is left of the link. Whoever needs a device slot takes, in this order, a free one, a finished prefix's,
a paused context's (the policy says which), and at last the youngest running sequence's. While sequences of several tenants
compete, `FairShare` says who is first, and who gives way.
"""

from typing import Literal

from jinfercept.kv.context import Found
from jinfercept.kv.manager import KVManager
from jinfercept.sched.cost import CostModel
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.fairness import FairShare
from jinfercept.sched.observer import Observer
from jinfercept.sched.plan import FROM_DEVICE, Chunk
from jinfercept.sched.plan_builder import Counters, PlanBuilder, Planned
from jinfercept.sched.policy import Action, Budget, Policy
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence, State
from jinfercept.sched.step_budget import StepBudget
from jinfercept.sched.transfers import Transfers

Preemption = Literal["auto", "recompute", "swap"]
"""What becomes of a preempted sequence's pages."""

_FROM_DEVICE = (FROM_DEVICE,)


class Scheduler:
    """The queues and the plans of one engine.

    Args:
        kv: the pages; the scheduler is its only user.
        policy: what becomes of paused contexts.
        cost: prices a step, for the link budget.
        estimator: is told when calls start and end; policies that want it hold it too.
        buckets: query tokens of the executables, ascending; the last is the most that one step computes.
        max_num_seqs: sequences that may run at once.
        max_model_len: tokens that a sequence may have; the device pool must hold them.
        chunk_tokens: most query tokens of one sequence in one step.
        whole_prompts: no chunked prefill: whoever can start is computed whole, several together, before anybody decodes.
        observer: told of states and moves.
        preemption: what becomes of the pages of a running sequence that gives way: the policy's choice (`auto`), or, for
            studies, dropped at once (`recompute`) or moved to the host whatever the link has left (`swap`).
    """

    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        cost: CostModel,
        estimator: Estimator,
        *,
        buckets: tuple[int, ...],
        max_num_seqs: int,
        max_model_len: int,
        chunk_tokens: int,
        whole_prompts: bool = False,
        observer: Observer | None = None,
        preemption: Preemption = "auto",
    ) -> None:
        self.kv = kv
        self.counters = Counters()
        self.max_model_len = max_model_len
        self._queues = Queues(max_num_seqs, observer)
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self.intercepted = self._queues.intercepted
        self._fair = FairShare(self._queues)
        self._several = False  # tenants compete in the plan that is made
        self._transfers = Transfers(kv, policy, self.counters, observer)
        self._policy = policy
        self._estimator = estimator
        self._room = StepBudget(cost, buckets, kv.page_size, policy.synchronous)
        self._largest = buckets[-1]
        self._chunk_tokens = chunk_tokens
        self._whole_prompts = whole_prompts
        self._preemption: Preemption = preemption
        self._stalled = False

    # -- requests come and go --------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self._queues.put_last(sequence)

    def accept(self, sequence: Sequence, token: int) -> None:
        """A sampled token was read: it is the sequence's next one."""
        sequence.pending -= 1
        sequence.generated += 1
        sequence.tokens.append(token)
        self.kv.commit(sequence.context, sequence.tokens)

    def intercept(self, sequence: Sequence, now: float, calls: tuple[PendingCall, ...] = ()) -> None:
        """The sequence has called out: samples still in flight are void, its pages become claims."""
        assert sequence.state in (State.RUNNING, State.WAITING)
        was_running = sequence.state is State.RUNNING
        sequence.paused_s, sequence.calls = now, calls
        self._void_pending(sequence)
        if was_running:
            self.kv.release(sequence.context)
        for call in calls:
            self._estimator.started(call, now)
        self._queues.intercept(sequence)
        self.counters.interceptions += 1
        self._policy.pause(sequence, now)

    def resume(self, sequence: Sequence, tokens: list[int], ended: tuple[CallDuration, ...] = ()) -> None:
        """All calls have returned: append their tokens and queue the sequence by its original arrival (or at the tail).

        Args:
            ended: how each of the sequence's calls ended.
        """
        assert sequence.state is State.INTERCEPTED
        for call, end in zip(sequence.calls, ended, strict=True):
            self._estimator.observe(call, end.duration_s, end.clean)
        sequence.external_spans.append((len(sequence.tokens), len(sequence.tokens) + len(tokens)))
        sequence.tokens.extend(tokens)
        self._come_back(sequence, in_place=True)

    def follow(self, kept: Sequence, sequence: Sequence, num_tokens: int, now: float, *, in_place: bool) -> None:
        """A new sequence goes on from one that has ended and was kept, intercepted: it takes over its context, and its pause.

        Args:
            kept: is gone afterwards.
            sequence: new, not added.
            num_tokens: leading tokens that both have; at least the new one's last is not among them.
            in_place: it is queued by the kept one's arrival, as after a call; else behind all others.
        """
        for call in kept.calls:
            self._estimator.observe(call, now - kept.paused_s)
        self._policy.resume(kept, now)
        self._queues.finish(kept)
        self.kv.close(sequence.context)
        sequence.context, kept.context = kept.context, sequence.context
        self.kv.cut(sequence.context, num_tokens)
        sequence.max_computed = min(kept.max_computed, num_tokens)
        sequence.adopted = Found(0, 0, 0)
        self._queues.intercept(sequence)  # for a moment, for the policy: it has been here since the kept one paused
        sequence.order, sequence.paused_s, sequence.calls = kept.order, kept.paused_s, kept.calls
        self._policy.pause(sequence, kept.paused_s)
        self._come_back(sequence, in_place)

    def _come_back(self, sequence: Sequence, in_place: bool) -> None:
        if in_place and not self._policy.requeues_at_tail:
            self._queues.wait(sequence)
        else:
            self._queues.put_last(sequence)
        self._policy.wait(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """The sequence is done or given up, in whatever state it is: its pages are free or cached at once."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.INTERCEPTED:
            for call in sequence.calls:
                self._estimator.observe(call, now - sequence.paused_s, clean=False)
        self._policy.resume(sequence, now)
        self._void_pending(sequence)
        self._queues.finish(sequence)
        self.kv.close(sequence.context)

    @property
    def protects_paused(self) -> bool:
        """Whether nothing is taken from a paused context while anybody runs."""
        return self._policy.protects_paused

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.intercepted)

    def num_waiting_of(self, tenant: str) -> int:
        """Sequences of a tenant that wait for their turn. From any thread."""
        line = self._queues.lines.get(tenant)
        return len(line.waiting) if line is not None else 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.intercepted.values()]

    # -- the plan --------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Planned:
        """The next iteration; its plan is empty (false) if nothing can be done before a result or a return arrives."""
        self.kv.store.begin()
        context_tokens = sum([len(sequence.tokens) + sequence.pending for sequence in self.running])
        hidden = self._room.link_tokens(len(self.running), context_tokens)
        draft = PlanBuilder(hidden, self._largest, context_tokens, now)
        self._stalled = False
        self._several = self._fair.charge(now)
        for sequence in self.running:
            sequence.planned = False
        if self._whole_prompts:
            self._admit_all(draft, now)
        elif self._several:
            self._admit_entitled(draft, now)
        if not self._whole_prompts or not draft.chunks:
            self._run_all(draft, now)
        if not self._whole_prompts:
            self._admit_all(draft, now)
        draft.link_tokens += self._room.link_tokens(self._largest - draft.room, context_tokens) - hidden
        self._move_all(draft, now)
        planned = draft.seal(
            self.counters.plans, self._room.bucket(self._largest - draft.room), self.kv.store.drain_dropped()
        )
        self.counters.plans += bool(planned.plan)
        return planned

    def _run_all(self, draft: PlanBuilder, now: float) -> None:
        """Give every running sequence its token or its next chunk, oldest first, keeping one token for each still to come."""
        if self._several:
            self._run_fairly(draft, now)
            return
        index = 0
        while index < len(self.running):  # preemption shortens the list from its young end
            sequence = self.running[index]
            index += 1
            if not self._decode(draft, sequence):
                self._run(draft, sequence, draft.room - (len(self.running) - index), now)

    def _run_fairly(self, draft: PlanBuilder, now: float) -> None:
        """The same for several tenants: in the order of service, prompts by their tenant's use."""
        order = [sequence for sequence in self._fair.service_order() if not sequence.planned]
        rooms = self._fair.rooms(order, draft.room)
        for sequence in order:
            if sequence.state is State.RUNNING and not self._decode(draft, sequence):
                self._run(draft, sequence, rooms[sequence.id], now)

    def _decode(self, draft: PlanBuilder, sequence: Sequence) -> bool:
        """Plan the next token of a sequence that lacks nothing for it: what `_run` comes to almost always, in short."""
        context, known = sequence.context, len(sequence.tokens)
        start = known + sequence.pending - 1
        if (
            context.ready != start
            or sequence.max_computed > start
            or start + 1 >= self.max_model_len
            or sequence.generated + sequence.pending >= sequence.max_tokens
            or len(sequence.table) < len(context.pages)
            or not self.kv.append(context)
        ):
            return False
        tokens = (sequence.tokens[start],) if start < known else _FROM_DEVICE
        sample = sequence.draw(start + 1)
        assert sequence.slot is not None
        draft.chunks.append((sequence, Chunk(sequence.slot, start, tokens, (), sample)))
        draft.room -= 1
        self.counters.computed += 1
        sequence.max_computed = start + 1
        sequence.planned = True
        sequence.pending += 1
        return True

    def _admit_all(self, draft: PlanBuilder, now: float) -> None:
        """Start waiting sequences in order while there is room; the first that cannot start holds back the rest.

        Those whose prompt another one is about to compute do not: they let others pass until it is there.
        """
        while self.waiting and self._queues.has_slot and draft.room > 0 and not self._stalled:
            if self._several:
                sequence = self._fair.next_waiting()
            else:
                sequence = next((waiting for waiting in self.waiting if not waiting.follows), None)
            if sequence is None:
                return
            if self._whole_prompts and draft.chunks:
                missing = self.kv.survey(sequence.context, sequence.length).missing
                if missing > draft.room:
                    return
            if sequence.pending or not self._admit(draft, sequence, now):
                return
            self._run(draft, sequence, draft.room, now)

    def _admit_entitled(self, draft: PlanBuilder, now: float) -> None:
        """Start waiting sequences of tenants below their share, before anybody else is served; others give way to them."""
        refused = set[str]()
        while not self._stalled and (sequence := self._fair.entitled(refused)) is not None:
            room = draft.room - sum([not running.planned for running in self.running])
            if room <= 0:
                return
            if sequence.pending or not self._place(draft, sequence, now):
                refused.add(sequence.tenant)
            else:
                self._run(draft, sequence, room, now)

    def _place(self, draft: PlanBuilder, sequence: Sequence, now: float) -> bool:
        """Admit a sequence by its tenant's right to a slot and to pages: sequences of tenants above their share give way."""
        while not (self._queues.has_slot and self._admit(draft, sequence, now)):
            giver = self._fair.giver(sequence, pages=self._queues.has_slot)
            if giver is None:
                return False
            self._preempt(draft, giver, now)
        return True

    def _admit(self, draft: PlanBuilder, sequence: Sequence, now: float) -> bool:
        """Turn the head of the line's claims into references if its whole context can be placed."""
        kv, context = self.kv, sequence.context
        if not sequence.wants_scores:
            kv.refresh(context, sequence.tokens)
        kv.hold(context)
        needed = self._slots_needed(sequence) + sum(self._slots_needed(other) + 1 for other in self.running)
        to_be_had = (
            kv.store.num_free + kv.store.num_cached + (0 if self._policy.protects_paused else kv.store.num_paused)
        )
        if self.running and needed > to_be_had:
            kv.release(context)
            if not sequence.max_computed:
                kv.close(context)  # it has nothing of its own yet: what it adopted stays a finished prefix
            return False
        self._queues.run(sequence)
        sequence.planned = False
        draft.context_tokens += sequence.length
        if not sequence.max_computed:
            sequence.max_computed = len(context.pages) * kv.page_size
        sequence.found = kv.survey(context, sequence.max_computed)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.found.device + sequence.found.host
            sequence.adopted = sequence.adopted and sequence.found
        self._policy.resume(sequence, now)
        return True

    def _slots_needed(self, sequence: Sequence) -> int:
        """Device slots that the sequence still lacks for the tokens it has and the next one."""
        context = sequence.context
        if context.ready >= sequence.length - 1:
            return 0
        wanted = sequence.length // self.kv.page_size + 1
        return self.kv.missing_slots(context) + max(0, wanted - len(context.pages))

    def _run(self, draft: PlanBuilder, sequence: Sequence, room: int, now: float) -> None:
        """Plan the sequence's fetches and its next chunk, as far as slots, bucket and link allow."""
        kv, context, length = self.kv, sequence.context, sequence.length
        if context.ready < length - 1:
            kv.advance(context)
            self._fetch(draft, sequence, now)
        if not sequence.wants_token or length >= self.max_model_len:
            return
        start = min(context.ready, length - 1)
        end = length if start == length - 1 else kv.gap_end(context, length)
        end = min(end, start + max(0, min(room, self._chunk_tokens)))
        for position in range(start, end):
            if kv.needs_slot(context, position):
                if not self._free_slot(draft, sequence, now):
                    end = position
                    break
                kv.give_slot(context, position)
        if start < end:
            self._add_chunk(draft, sequence, start, end)

    def _add_chunk(self, draft: PlanBuilder, sequence: Sequence, start: int, end: int) -> None:
        assert sequence.slot is not None
        known = len(sequence.tokens)
        assert end <= known or start == known, "a sample in flight is a chunk of its own"
        tokens = tuple(sequence.tokens[start:end]) if end <= known else _FROM_DEVICE
        sample = sequence.draw(end) if end == sequence.length else None
        score = None if sequence.num_best is None else sequence.score(start, end)
        chunk = Chunk(sequence.slot, start, tokens, self._new_pages(sequence, end), sample, score)
        self.kv.computed(sequence.context, start, end)
        recomputed = max(0, min(end, sequence.max_computed) - start)
        sequence.max_computed = max(sequence.max_computed, end)
        if recomputed:
            sequence.recomputed += recomputed
            draft.recomputed += recomputed
            draft.recomputing.append(sequence)
        sequence.planned = True
        sequence.pending += sample is not None
        self.counters.computed += end - start
        self.counters.recomputed += recomputed
        draft.chunks.append((sequence, chunk))
        draft.room -= end - start

    def _new_pages(self, sequence: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """Entries of the page table, up to the chunk's end, that the runner does not know yet."""
        table, pages = sequence.table, sequence.context.pages
        new = []
        for index in range(len(table), (end - 1) // self.kv.page_size + 1):
            slot = pages[index].device
            assert slot is not None
            table.append(slot)
            new.append((index, slot))
        return tuple(new)

    def _fetch(self, draft: PlanBuilder, sequence: Sequence, now: float) -> None:
        """Bring the sequence's host pages back, first token first, as far as the link's budget and the slots go."""
        for page in list(self.kv.host_only(sequence.context)):
            if not self._transfers.may_move(draft) or not self._free_slot(draft, sequence, now):
                return
            if not self._transfers.may_move(draft):
                return
            self._transfers.fetch(draft, sequence, page)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _free_slot(self, draft: PlanBuilder, sequence: Sequence, now: float) -> bool:
        """See to it that a device slot is free; False if `sequence` has to wait for one."""
        kv, policy = self.kv, self._policy
        if kv.store.num_free or kv.store.evict_cached():
            return True
        if not policy.protects_paused and self._evict(draft, now):
            return True
        while self.running and (last := self._last_served()) is not sequence and not last.planned:
            self._preempt(draft, last, now)
            if kv.store.num_free or kv.store.evict_cached() or (not policy.protects_paused and self._evict(draft, now)):
                return True
        if self.running[0] is sequence and policy.protects_paused and self._evict(draft, now):
            return True
        self._stalled = True
        return False

    def _last_served(self) -> Sequence:
        """The running sequence that gives way first."""
        return self._fair.last_served() if self._several else self.running[-1]

    def _evict(self, draft: PlanBuilder, now: float) -> bool:
        """Take one slot from the paused contexts, in the policy's order."""
        if not self.kv.store.num_paused:
            return False
        for victims in (draft.victims or iter(()), self._policy.victims(now)):
            draft.victims = victims
            if any(self._transfers.move(draft, move) for move in victims):
                return True
        return self.kv.store.evict_paused()

    def _preempt(self, draft: PlanBuilder, sequence: Sequence, now: float) -> None:
        """Send a running sequence back to the queue; its pages become claims."""
        self._queues.wait(sequence)
        self.kv.release(sequence.context)
        draft.victims = None
        sequence.preemptions += 1
        self.counters.preemptions += 1
        if self._preemption == "auto":
            self._policy.pause(sequence, now)
            self._move_all(draft, now)
        else:
            action = Action.SWAP if self._preemption == "swap" else Action.LOSE
            self._transfers.force_out(draft, sequence, action)

    def _move_all(self, draft: PlanBuilder, now: float) -> None:
        queries = self._largest - draft.room
        budget = Budget(draft.room, draft.link_tokens, draft.context_tokens, queries)
        for move in self._policy.moves(budget, now):
            self._transfers.move(draft, move)

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def _void_pending(self, sequence: Sequence) -> None:
        sequence.pending = 0
        sequence.epoch += 1
