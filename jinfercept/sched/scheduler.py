"""Makes one `StepPlan` after another: which sequences run, which wait, which pages move. Runs nothing, knows no text.

A plan is built in one pass. First come the running sequences in order of arrival, each with its one token or the next chunk
of its missing tokens. Then waiting ones, first come first served or by an `Order`, fill the rest of the bucket. At last the
policy's moves for paused contexts fill the rest of the link's budget. While tenants compete, `FairShare` gives the order of
service and the sequences that give way.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.kv.context import ContextResidency
from jinfercept.kv.manager import KVManager
from jinfercept.sched.chunk_planner import ChunkPlanner
from jinfercept.sched.door import Door, Overload
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.orders import Order, OrderChoice, make_order
from jinfercept.sched.plan_builder import MoveOrder, PlanBuilder, PlannedStep, SchedulerCounters
from jinfercept.sched.policies import WHOLE_PROMPTS, PolicyChoice, PolicyInputs
from jinfercept.sched.policy import Observer, Policy
from jinfercept.sched.profile import CostModel, Profile, StepBudget
from jinfercept.sched.queues import FairShare, Queues, Rank
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence, State
from jinfercept.sched.speculation import NO_DRAFTS, Speculation, SpeculationLimits
from jinfercept.sched.transfers import PreemptedSequences, Preemption, Transfers

MOST_TURNED_AWAY_S = 30.0
"""Seconds for which a policy may let nothing run although sequences wait; then the first of them starts."""


class SchedulerLimits(NamedTuple):
    """The limits of a step and of the running sequences."""

    buckets: tuple[int, ...]  # query tokens of the executables, ascending
    max_num_seqs: int
    max_model_len: int
    max_chunk_tokens: int | None = None  # query tokens of one sequence in one step; None: no limit of its own
    # None: chunked, unless the policy was published with whole prompts and a step holds the longest sequence
    chunked_prefill: bool | None = None
    preemption: Preemption = "policy"
    speculation: SpeculationLimits = NO_DRAFTS
    overload: Overload = "serve"

    def chunks(self, policy: PolicyChoice) -> bool:
        """Whether prefill is chunked under a policy. Raises `ConfigError` if no step holds whole prompts that are asked for."""
        fits = self.max_model_len <= self.buckets[-1] and self.max_chunk_tokens is None
        if self.chunked_prefill is False and not fits:
            raise ConfigError(
                "chunked_prefill can only be turned off where a step holds the longest sequence",
                got=f"steps of {self.buckets[-1]} tokens, sequences of {self.max_model_len}, "
                f"max_chunk_tokens={self.max_chunk_tokens}",
                fix="raise max_num_batched_tokens or lower max_model_len, and give no max_chunk_tokens",
            )
        if self.chunked_prefill is not None:
            return self.chunked_prefill
        return policy not in WHOLE_PROMPTS or not fits


class Scheduler:
    """The queues and the plans of one engine, which alone uses `kv`.

    With `whole_prompts`, waiting sequences are computed whole, several together, before any sequence decodes.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        cost: CostModel,
        estimator: Estimator,
        limits: SchedulerLimits,
        *,
        whole_prompts: bool = False,
        order: Order | None = None,
    ) -> None:
        buckets = limits.buckets
        chunk_tokens = min(limits.max_chunk_tokens or buckets[-1], buckets[-1])
        self.kv = kv
        self.counters = SchedulerCounters()
        self.max_model_len, self.max_num_seqs = limits.max_model_len, limits.max_num_seqs
        self._queues = queues = Queues(limits.max_num_seqs, order)
        self.running, self.waiting, self.intercepted = queues.running, queues.waiting, queues.intercepted
        self.door = Door(kv, queues, cost, buckets[-1], limits.overload)
        self._policy, self._estimator = policy, estimator
        self._budget = StepBudget(cost, buckets, kv.page_size, policy.synchronous)
        self._fair = FairShare(queues)
        preempted = PreemptedSequences(limits.preemption, cost, chunk_tokens, kv.page_size, has_host=kv.has_host)
        self._transfers = transfers = Transfers(kv, queues, self._fair, policy, self.counters, preempted)
        self.speculation: Speculation | None = None
        if limits.speculation.num_drafts:
            self.speculation = Speculation(limits.speculation, kv, self._budget, self.max_model_len, self.counters)
        self._chunks = ChunkPlanner(
            kv, queues, transfers, self.counters, max_model_len=self.max_model_len, chunk_tokens=chunk_tokens
        )
        self._largest, self._whole_prompts = buckets[-1], whole_prompts
        self._turned_away_s: float | None = None  # since when nothing runs, for the policy lets nothing start

    def observe(self, observer: Observer) -> None:
        """Report all changes of state and all moves to an observer from now on."""
        self._queues.observer = self._transfers.observer = observer

    # -- requests come and go --------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, repeated: Sequence | None = None, *, at_door: float | None = None) -> None:
        """Queue a new sequence behind all others, or at the place of an aborted one of its conversation that it repeats.

        `at_door` is the second at which it comes to the door, since it begins a conversation; None: it begins none.
        """
        if repeated is not None:
            sequence.since_s = repeated.since_s
        if at_door is not None and self.door.overload != "serve":
            self.door.add(sequence, at_door)
        elif repeated is not None and repeated.order:
            self._queues.put_in_place(sequence, repeated)
        else:
            self._queues.put_last(sequence)

    def accept(self, sequence: Sequence, token: int, *, computed: bool = False) -> None:
        """Append a sampled token to its sequence; `computed`: it was a draft, whose KV is there."""
        sequence.pending -= 1
        sequence.generated += 1
        sequence.tokens.append(token)
        # a state of recurrent layers has not seen the draft
        if computed and not self.kv.has_states:
            end = sequence.max_computed = len(sequence.tokens)
            self.kv.computed(sequence.context, end - 1, end)
        if len(sequence.tokens) >= sequence.context.uncommitted:  # as rarely
            self.kv.commit(sequence.context, sequence.tokens)

    def intercept(
        self, sequence: Sequence, now: float, calls: tuple[PendingCall, ...] = (), *, begun: bool = False
    ) -> None:
        """Pause a sequence that waits for calls: its samples in flight are void, its references evictable."""
        assert sequence.state in (State.RUNNING, State.WAITING)
        was_running = sequence.state is State.RUNNING
        sequence.paused_s, sequence.calls, sequence.awaited = now, calls, calls
        sequence.void_pending()
        if was_running:
            self.kv.release(sequence.context)
        # `begin_call` knows asynchronous calls already
        for call in () if begun else calls:
            self._estimator.started(call, now)
        self._queues.intercept(sequence)
        self.counters.interceptions += 1
        self._policy.pause(sequence, now)

    def isolate(self, sequence: Sequence) -> None:
        """Compute a sequence anew that runs or waits to run, on pages that no other sequence shares."""
        assert sequence.state in (State.RUNNING, State.WAITING)
        sequence.void_pending()
        self.counters.preempt(sequence)
        self._queues.wait(sequence)
        self.kv.isolate(sequence.context)

    def resume(self, sequence: Sequence, tokens: list[int], ended: tuple[CallDuration, ...] = ()) -> None:
        """Append the results of a sequence's calls, and queue it by its original arrival (or last, as the policy says).

        `ended` has the duration of each awaited call; it is empty after asynchronous calls, which have ended.
        """
        assert sequence.state is State.INTERCEPTED
        for call, end in zip(sequence.awaited, ended, strict=True):
            self._estimator.observe(call, end.duration_s, end.clean)
        sequence.awaited = ()
        residency = sequence.context.residency(sequence.max_computed)
        self.counters.returned += sequence.max_computed
        self.counters.kept += residency.device + residency.host
        sequence.append_external(tokens)
        self._queue_again(sequence, in_place=True)

    # -- asynchronous calls ----------------------------------------------------------------------------------------

    def begin_call(self, call: PendingCall, now: float) -> None:
        """A sequence has called out and goes on."""
        self._estimator.started(call, now)

    def end_call(self, sequence: Sequence, call: PendingCall, end: CallDuration) -> None:
        """An asynchronous call of a sequence has ended, whether the sequence waits for it or not."""
        self._estimator.observe(call, end.duration_s, end.clean)
        sequence.awaited = tuple([awaited for awaited in sequence.awaited if awaited.key != call.key])

    def inject(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append the results of asynchronous calls to a sequence that runs or waits to run. Its samples in flight are void."""
        assert sequence.state in (State.RUNNING, State.WAITING)
        sequence.void_pending()
        sequence.row.has_history = False
        sequence.append_external(tokens)

    def extend(self, retained: Sequence, sequence: Sequence, num_tokens: int, now: float, *, in_place: bool) -> None:
        """Hand the context of a finished request, whose sequence is intercepted, to the new sequence of its follow-up; queue
        that.

        `num_tokens` are the leading tokens that both have, without the new one's last. `in_place` queues the sequence by the
        arrival of `retained`, as after a call; else it is last.
        """
        self._policy.resume(retained, now)
        self._queues.finish(retained)
        self.kv.close(sequence.context)
        sequence.context, retained.context = retained.context, sequence.context
        self.kv.cut(sequence.context, num_tokens)
        sequence.max_computed = min(retained.max_computed, num_tokens)
        sequence.usage.retained = ContextResidency(0, 0, 0)
        if sequence.session == sequence.id:
            sequence.session = retained.session
        self._queues.succeed(sequence, retained)  # for the policy, which sees a pause that goes on and then ends
        sequence.paused_s, sequence.calls, sequence.awaited = retained.paused_s, retained.calls, retained.awaited
        self._policy.pause(sequence, retained.paused_s)
        for call in retained.calls:  # behind the policy, which has estimates made of calls that go on
            self._estimator.observe(call, now - retained.paused_s)
        self._queue_again(sequence, in_place)

    def _queue_again(self, sequence: Sequence, in_place: bool) -> None:
        if in_place and not self._policy.requeues_at_tail:
            self._queues.wait(sequence)
        else:
            self._queues.put_last(sequence)
        self._policy.wait(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence in whatever state it is. Its pages are free or cached at once."""
        if sequence.state is State.FINISHED:
            return
        try:
            if sequence.state is State.INTERCEPTED:
                for call in sequence.awaited:
                    self._estimator.observe(call, now - sequence.paused_s + call.head_start_s, clean=False)
            self._policy.resume(sequence, now)
        finally:  # an estimator, a policy or an order that raises keeps no page
            sequence.void_pending()
            if sequence.at_door:
                self.door.sequences.remove(sequence)
            try:
                self._queues.finish(sequence)
            finally:
                self.kv.close(sequence.context)

    @property
    def protects_paused(self) -> bool:
        """Whether paused contexts lose no page while a sequence runs."""
        return self._policy.protects_paused

    def admits(self, sequence: Sequence, now: float) -> bool:
        return self._policy.admits(sequence, now)

    def num_waiting_of(self, tenant: str) -> int:
        """Sequences of a tenant in the waiting queue and at the door. From any thread."""
        at_door = sum([sequence.tenant == tenant for sequence in self.door.sequences])
        return at_door + (len(queue.waiting) if (queue := self._queues.by_tenant.get(tenant)) is not None else 0)

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.door.sequences, *self.intercepted.values()]

    def free_host(self, sequence: Sequence, num_pages: int, now: float) -> None:
        """Free host slots for pages of a waiting sequence, as far as the policy lets copies go. Between two plans."""
        self._transfers.free_host(MoveOrder(self._policy.host_victims(sequence, now)), num_pages)

    # -- all sequences at once, with no plan in flight ----------------------------------------------------------------

    def change_weights(self, *, recompute: bool) -> None:
        """The weights have changed: drop finished prefixes; sequences that were never computed share no older page.

        With `recompute`, all sequences lose their pages. Those that ran wait again; intercepted ones do when they return.
        """
        # A page of older weights that is to be computed again is worth nothing, whatever the waste equations say of its age:
        # it goes at once, on the device and on the host.
        self.kv.drop_prefixes(apart=True)
        self._renew([sequence for sequence in self.unfinished if recompute or not sequence.max_computed])

    def leave_device(self, now: float) -> None:
        """Give all device slots back. Running sequences wait again."""
        for sequence in self.running.copy():
            sequence.void_pending()
            self._transfers.set_aside(sequence, now)
        self.kv.begin_plan()
        # sequences keep their host copies, but contexts with windows or states are whole or lost
        if self.kv.side_pool:
            self._renew([*self.waiting, *self.intercepted.values()])
        else:
            self.kv.leave_device()

    def _renew(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.state is State.RUNNING:
                sequence.void_pending()
                self.counters.preempt(sequence)
                self._queues.wait(sequence)
            self.kv.renew(sequence.context)
        self.kv.drop_prefixes()
        # the first of those that wait with the same prompt computes it for the others
        leaders: dict[tuple[str, bytes, bytes], Sequence] = {}
        waiting = [sequence for sequence in sequences if sequence.state is State.WAITING]
        for sequence in sorted(waiting, key=lambda sequence: sequence.order):
            prompt = sequence.tokens[: sequence.external_spans[0][1]].tobytes()
            leader = leaders.setdefault((sequence.tenant, sequence.context.root, prompt), sequence)
            sequence.leader = None if leader is sequence else leader

    # -- the plan --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether the next plan should wait for the tokens of the steps in flight: for drafts."""
        return self.speculation is not None and self.speculation.waits(self.running)

    def plan(self, now: float) -> PlannedStep:
        """The next iteration; its plan is empty (false) if nothing can be done before a plan or a call returns."""
        self.kv.begin_plan()
        if self.door.sequences:
            self.door.open(now)
        self._queues.rank(now)
        context_tokens = sum([len(sequence.tokens) + sequence.pending for sequence in self.running])
        hidden = self._budget.link_tokens(len(self.running), context_tokens)
        compete = len(self._queues.by_tenant) > 1 or self._fair.served  # else there is one tenant, and was before
        builder = PlanBuilder(
            now, hidden, self._largest, context_tokens, bool(compete) and self._fair.compete(), self._largest
        )
        for sequence in self.running:
            sequence.planned = False
        if self._whole_prompts:
            self._admit_all(builder)
        elif builder.tenants_compete:
            self._admit_entitled(builder)
        if (self._queues.order is not None or builder.tenants_compete) and not self._whole_prompts:
            self._run_ranked(builder)
        elif not self._whole_prompts or not builder.chunks:
            self._run_all(builder)
        if self.waiting and not self._whole_prompts:
            self._admit_all(builder)
        if self.speculation is not None:
            self.speculation.extend(builder)
        if builder.tenants_compete:
            for sequence, chunk in builder.chunks:
                self._fair.charge(sequence, len(chunk.tokens))
        if (used := self._largest - builder.query_tokens) != len(self.running):
            builder.link_tokens += self._budget.link_tokens(used, context_tokens) - hidden
        self._chunks.fetch_more(builder)
        self._transfers.move_paused(builder)
        planned = builder.build(
            self.counters.plans,
            self._budget.bucket(used),
            self.kv.take_dropped(),
            self.kv.take_dropped_sides(),
        )
        self.counters.plans += bool(planned.plan)
        return planned

    @property
    def turns_away(self) -> bool:
        """Whether nothing runs because the policy lets no waiting sequence start."""
        return self._turned_away_s is not None

    def _run_all(self, builder: PlanBuilder) -> None:
        index = 0
        while index < len(self.running):  # preemption shortens the list from its young end
            sequence = self.running[index]
            index += 1
            if not self._chunks.decode(builder, sequence):
                # a token is left for each sequence that follows
                self._chunks.run(builder, sequence, builder.query_tokens - (len(self.running) - index))

    def _run_ranked(self, builder: PlanBuilder) -> None:
        # First the next tokens of running sequences; then, by rank, chunks of those that lack more, and starts of waiting
        # ones. While tenants compete, the ranks are those of `FairShare`, and waiting sequences start afterwards.
        lacking, is_shared = list[tuple[Rank, Sequence]](), builder.tenants_compete
        for sequence in self._fair.service_order() if is_shared else self.running.copy():
            if sequence.state is not State.RUNNING or sequence.planned or self._chunks.decode(builder, sequence):
                continue  # another one has preempted it, or it is planned
            if sequence.context.ready < sequence.length - 1:
                rank = self._fair.rank(sequence) if is_shared else self._queues.rank_of(sequence, builder.now)
                lacking.append((rank, sequence))
            else:
                self._chunks.run(builder, sequence, builder.query_tokens)
        lacking.sort()
        for rank, sequence in lacking:
            if not is_shared:
                self._admit_all(builder, rank)
            if sequence.state is State.RUNNING and builder.query_tokens > 0:
                self._chunks.run(builder, sequence, builder.query_tokens)

    def _admit_all(self, builder: PlanBuilder, before: Rank | None = None) -> None:
        # the first sequence that has no room holds back the rest
        while self.waiting and self._queues.free_slots and builder.query_tokens > 0 and not builder.stalled:
            sequence = self._fair.next_waiting() if builder.tenants_compete else self._next_waiting(builder.now)
            if sequence is None or (before is not None and sequence.rank >= before):
                return
            lacks = sequence.context.residency(sequence.length).missing if self._whole_prompts and builder.chunks else 0
            if lacks > builder.query_tokens:
                return
            if sequence.pending or not self._start(builder, sequence):
                return
            self._chunks.run(builder, sequence, builder.query_tokens)

    def _next_waiting(self, now: float) -> Sequence | None:
        can_start = (sequence for sequence in self.waiting if sequence.may_start)
        admitted = next((sequence for sequence in can_start if self._policy.admits(sequence, now)), None)
        first = None if admitted or self.running else next((it for it in self.waiting if it.may_start), None)
        if first is None:
            self._turned_away_s = None
            return admitted
        self._turned_away_s = now if self._turned_away_s is None else self._turned_away_s
        return first if now - self._turned_away_s >= MOST_TURNED_AWAY_S else None

    def _admit_entitled(self, builder: PlanBuilder) -> None:
        # a waiting sequence of each tenant that has a right to one starts before other sequences are planned
        left_out = self._fair.without_right()
        while not builder.stalled and (sequence := self._fair.next_waiting(left_out)) is not None:
            most = builder.query_tokens - sum([not running.planned for running in self.running])
            if most <= 0:
                return
            if not sequence.pending and self._place(builder, sequence):
                self._chunks.run(builder, sequence, most)
            left_out.add(sequence.tenant)

    def _place(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        while not (self._queues.free_slots and self._start(builder, sequence)):
            victim = self._fair.victim(sequence)
            if victim is None:
                return False
            self._transfers.preempt(builder, victim)
        return True

    def _start(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        kv, context = self.kv, sequence.context
        if kv.side_pool:
            kv.step_back(context, sequence.length)  # a state that has seen the last token cannot give its logits again
        if not sequence.wants_computation:
            kv.refresh(context, sequence.tokens)
        kv.hold(context)
        has_room = not self._queues.running or self._has_room(sequence)
        if not has_room:
            kv.release(context)
            if not sequence.max_computed:
                kv.close(context)  # all its pages are shared ones: they stay cached prefixes
            return False
        self._queues.run(sequence)
        sequence.planned = False
        builder.context_tokens += sequence.length
        if not sequence.max_computed:
            sequence.max_computed = context.num_pages * kv.page_size
        usage = sequence.usage
        usage.residency = residency = context.residency(sequence.max_computed)
        if usage.num_cached is None:
            usage.num_cached = residency.device + residency.host
            usage.retained = usage.retained and residency
        self.door.started(sequence, builder.now)
        self._policy.resume(sequence, builder.now)
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        if (side := self.kv.side_pool) is not None:
            lengths = [other.length for other in (sequence, *self._queues.running)]
            if not side.have_room(lengths, self._largest, beside_paused=self._policy.protects_paused):
                return False
        num_free = self.kv.num_available - self._slots_needed(sequence)
        # a page more for each running sequence
        num_free -= sum([self._slots_needed(other) + 1 for other in self._queues.running])
        if not self._policy.protects_paused:
            num_free += self.kv.num_paused
        return num_free >= 0

    def _slots_needed(self, sequence: Sequence) -> int:
        context, length = sequence.context, sequence.length
        return 0 if context.ready >= length - 1 else self.kv.slots_needed(context, length + 1)


@dataclass(frozen=True, slots=True)
class SchedulerBuild:
    """A scheduler that lacks only its pages."""

    inputs: PolicyInputs
    policy: Policy
    order: Order | None
    limits: SchedulerLimits
    chunks: bool

    def build(self, kv: KVManager) -> Scheduler:
        return Scheduler(
            kv,
            self.policy,
            self.inputs.cost,
            self.inputs.estimator,
            self.limits,
            whole_prompts=not self.chunks,
            order=self.order,
        )


def plan_scheduler(
    profile: Profile,
    estimator: Estimator,
    policy: PolicyChoice,
    limits: SchedulerLimits,
    page_size: int,
    order: OrderChoice = "fcfs",
) -> SchedulerBuild:
    """Makes the policy and the order of a scheduler. Raises `ConfigError` as `make_choice` and `SchedulerLimits.chunks`."""
    buckets = limits.buckets
    # S is the largest bucket up to the profile's saturation point, or the smallest bucket
    saturation = max((size for size in buckets if size <= profile.saturation), default=buckets[0])
    inputs = PolicyInputs(profile, saturation, page_size, estimator)
    return SchedulerBuild(inputs, inputs.make(policy), make_order(order, inputs), limits, limits.chunks(policy))
