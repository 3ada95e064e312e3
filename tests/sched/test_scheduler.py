"""Who runs, who waits and what moves, plan by plan, on a runner that checks where every token's KV is."""

from collections.abc import Iterable, Iterator
from typing import final

import pytest
from fakes import POLICIES, VOCAB, AffineCost, FakeRunner
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.kv.store import PageCopy
from jinfercept.sched.draft import Planned
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.plan import FROM_DEVICE, Chunk, Sample, StepPlan
from jinfercept.sched.policy import Action, Budget, Move, Policy, discard, improved_discard, preserve, scripted, swap
from jinfercept.sched.scheduler import Preemption, Scheduler
from jinfercept.sched.sequence import Sequence, State

SIZE = 4


class Desk:
    """A scheduler, its runner, and the results in between, as an engine handles them (without calls)."""

    def __init__(
        self,
        policy: Policy,
        *,
        num_pages: int = 100,
        num_host_pages: int = 100,
        buckets: tuple[int, ...] = (4, 16),
        max_num_seqs: int = 4,
        chunk_tokens: int = 1 << 30,
        link_tokens_per_s: float = 1e9,
        depth: int = 0,
        preemption: Preemption = "auto",
    ) -> None:
        self.kv = KVManager(num_pages, num_host_pages, SIZE)
        self.scheduler = Scheduler(
            self.kv,
            policy,
            AffineCost(fixed_s=1.0, per_query_s=0.0, link_tokens_per_s=link_tokens_per_s),
            ElapsedEstimator(),
            buckets=buckets,
            max_num_seqs=max_num_seqs,
            max_model_len=num_pages * SIZE,
            chunk_tokens=chunk_tokens,
            preemption=preemption,
        )
        self.runner = FakeRunner(SIZE, buckets)
        self.depth = depth
        self.in_flight: list[tuple[Planned, tuple[int, ...]]] = []
        self.num_wasted = 0

    def add(self, name: str, num_tokens: int, max_tokens: int = 8) -> Sequence:
        """A sequence of its own tokens: nothing is shared."""
        tokens = [(len(name) * 31 + ord(name[0]) + i * i) % VOCAB for i in range(num_tokens)]
        sequence = Sequence(name, tokens, self.kv.open(), max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """A plan, executed; and the result that is due."""
        planned = self.scheduler.plan(0.0)
        if planned.plan:
            self.in_flight.append((planned, self.runner.submit(planned.plan).tokens))
        if self.in_flight and (len(self.in_flight) > self.depth or not planned.plan):
            self.apply(*self.in_flight.pop(0))
        self.kv.check([sequence.context for sequence in self.scheduler.unfinished])
        return planned.plan

    def apply(self, planned: Planned, tokens: tuple[int, ...]) -> None:
        for (sequence, incarnation), token in zip(planned.sampled, tokens, strict=True):
            if sequence.incarnation != incarnation:
                self.num_wasted += 1
                continue
            self.scheduler.accept(sequence, token)
            if sequence.generated == sequence.max_tokens:
                self.scheduler.finish(sequence, 0.0)

    def steps(self, number: int) -> list[StepPlan]:
        return [self.step() for _ in range(number)]

    def drain(self) -> list[StepPlan]:
        """Everybody who runs or waits, to the end."""
        plans = []
        while self.scheduler.running or self.scheduler.waiting or self.in_flight:
            plans.append(self.step())
            assert len(plans) < 2000, "starved"
        return plans

    def prefilled(self, name: str, num_tokens: int, max_tokens: int = 8) -> Sequence:
        """A sequence that decodes."""
        sequence = self.add(name, num_tokens, max_tokens)
        while sequence.generated == 0:
            self.step()
        return sequence

    def paused(self, name: str, num_tokens: int) -> Sequence:
        sequence = self.prefilled(name, num_tokens)
        self.scheduler.intercept(sequence, 0.0)
        return sequence


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.id for sequence in sequences]


def residencies(sequence: Sequence) -> list[Residency]:
    return [page.residency for page in sequence.context.pages]


@final
class CopyEverything:
    """Copies every page of every paused request, as the link allows, and drops none before it must."""

    requeues_at_tail = False
    protects_paused = False
    synchronous = False

    def __init__(self) -> None:
        self.paused: dict[str, Sequence] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self.paused[sequence.id] = sequence

    def wait(self, sequence: Sequence) -> None:
        pass

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float) -> Iterator[Move]:
        for sequence in self.paused.values():
            for page in sequence.context.pages:
                yield Move(sequence, page, Action.COPY, "ahead")

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in list(self.paused.values()):
            for page in reversed(sequence.context.pages):
                yield Move(sequence, page, Action.SWAP, "a slot is needed")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return iter(())


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_first_come_is_the_first_served() -> None:
    desk = Desk(preserve(), max_num_seqs=2)
    for name in ("a", "b", "c", "d"):
        desk.add(name, 4, max_tokens=2)
    desk.step()
    assert names(desk.scheduler.running) == ["a", "b"]
    assert names(desk.scheduler.waiting) == ["c", "d"]
    desk.drain()
    ends = [chunk.slot for plan in desk.runner.plans for chunk in plan.chunks]
    assert len(ends) == 8


def test_a_return_keeps_its_place_by_original_arrival() -> None:
    desk = Desk(improved_discard(), max_num_seqs=1)
    first = desk.paused("a", 4)
    for name in ("b", "c"):
        desk.add(name, 4)
    desk.scheduler.resume(first, [1, 2])
    assert names(desk.scheduler.waiting) == ["a", "b", "c"]


def test_discard_sends_a_return_to_the_tail() -> None:
    desk = Desk(discard(), max_num_seqs=1)
    first = desk.paused("a", 4)
    for name in ("b", "c"):
        desk.add(name, 4)
    desk.scheduler.resume(first, [1, 2])
    assert names(desk.scheduler.waiting) == ["b", "c", "a"]


def test_the_head_of_the_line_is_not_overtaken_by_smaller_ones() -> None:
    desk = Desk(preserve(), num_pages=10)
    desk.prefilled("runs", 20, max_tokens=12)
    desk.add("large", 36, max_tokens=2)
    small = desk.add("small", 2, max_tokens=2)
    while desk.scheduler.waiting and desk.scheduler.waiting[0].id == "large":
        assert small.generated == 0
        desk.step()
    desk.drain()
    assert small.state is State.FINISHED


def test_the_head_of_the_line_is_served_though_others_keep_coming() -> None:
    desk = Desk(preserve(), num_pages=8, max_num_seqs=3)
    large = desk.add("large", 28, max_tokens=2)
    for number in range(60):
        desk.add(f"s{number}", 3, max_tokens=2)
        desk.step()
    assert large.state is State.FINISHED
    desk.drain()


# -- the bucket --------------------------------------------------------------------------------------------------------


def test_decoding_comes_first_and_a_chunk_fills_the_bucket() -> None:
    desk = Desk(preserve())
    for name in ("a", "b"):
        desk.prefilled(name, 3)
    desk.add("long", 40)
    plan = desk.step()
    assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 14]
    assert (plan.num_tokens, plan.bucket) == (16, 16)
    assert [chunk.sample is not None for chunk in plan.chunks] == [True, True, False]


def test_the_smallest_bucket_that_holds_the_tokens_is_used() -> None:
    desk = Desk(preserve(), buckets=(1, 4, 16))
    desk.add("a", 3)
    assert desk.step().bucket == 4
    assert desk.step().bucket == 1
    desk.add("b", 5)
    assert desk.step().bucket == 16


def test_a_long_context_that_returns_leaves_a_token_to_everybody_younger() -> None:
    desk = Desk(improved_discard(), buckets=(4,), max_num_seqs=3)
    long = desk.paused("long", 30)
    for name in ("b", "c"):
        desk.prefilled(name, 2, max_tokens=20)
    desk.scheduler.resume(long, [1])
    desk.step()
    assert names(desk.scheduler.running) == ["long", "b", "c"]
    for plan in desk.steps(4):
        assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 2]


def test_no_chunk_is_longer_than_the_limit() -> None:
    desk = Desk(preserve(), chunk_tokens=3)
    desk.add("a", 11, max_tokens=2)
    desk.add("b", 5, max_tokens=2)
    plans = desk.drain()
    assert [len(chunk.tokens) for plan in plans for chunk in plan.chunks if chunk.slot == 0] == [3, 3, 3, 2, 1]
    assert max(plan.num_tokens for plan in plans) == 6


@given(
    st.lists(st.tuples(st.integers(1, 26), st.integers(1, 6)), min_size=1, max_size=8),
    st.sampled_from([preserve, swap, discard, improved_discard, CopyEverything]),
    st.integers(8, 12),
    st.integers(1, 20),
    st.sampled_from([0, 1]),
)
def test_the_bucket_is_never_exceeded_and_everybody_ends(
    requests: list[tuple[int, int]], policy: type[Policy], num_pages: int, chunk_tokens: int, depth: int
) -> None:
    desk = Desk(policy(), num_pages=num_pages, num_host_pages=5, chunk_tokens=chunk_tokens, buckets=(5,), depth=depth)
    sequences = [desk.add(f"{index}", *request) for index, request in enumerate(requests)]
    for plan in desk.drain():
        assert plan.num_tokens <= 5
        assert all(len(chunk.tokens) <= chunk_tokens for chunk in plan.chunks)
        assert len(plan.chunks) <= 4
    assert [sequence.generated for sequence in sequences] == [max_tokens for _, max_tokens in requests]
    assert desk.num_wasted == 0
    assert desk.kv.store.num_claimed == 0


# -- slots -------------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_when_a_page_is_missing() -> None:
    desk = Desk(improved_discard(), num_pages=6)
    old = desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    while young.state is State.RUNNING:
        desk.step()
    assert old.preemptions == 0
    assert young.state is State.WAITING
    desk.drain()
    assert (old.generated, young.generated) == (10, 10)
    assert young.recomputed >= 8


def test_a_preempted_sequence_uses_the_host_tier_too() -> None:
    desk = Desk(swap(), num_pages=6)
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.recomputed == 0
    assert young.copied_out == young.copied_in >= 8


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_can_be_forced_under_every_policy(policy: str) -> None:
    desk = Desk(POLICIES[policy](), num_pages=6, preemption="recompute")
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.copied_in == 0
    assert young.recomputed >= 8

    desk = Desk(POLICIES[policy](), num_pages=6, preemption="swap", link_tokens_per_s=1.0)
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.recomputed == 0
    assert young.copied_out >= young.copied_in >= 8


def test_a_finished_prefix_goes_before_a_paused_context_and_that_before_a_running_one() -> None:
    desk = Desk(CopyEverything(), num_pages=8)
    desk.prefilled("done", 8, max_tokens=1)
    paused = desk.paused("paused", 8)
    runs = desk.prefilled("runs", 3, max_tokens=28)
    assert desk.kv.store.num_cached
    seen = []
    while runs.state is State.RUNNING:
        seen.append((desk.kv.store.num_cached > 0, residencies(paused)[0] is Residency.CLEAN))
        desk.step()
    assert (True, False) not in seen
    assert seen[-1] == (False, False)
    assert runs.preemptions == 0


def test_a_paused_context_gives_no_page_under_preserve_while_anybody_older_runs() -> None:
    desk = Desk(preserve(), num_pages=8)
    old = desk.prefilled("old", 8, max_tokens=8)
    paused = desk.paused("paused", 8)
    young = desk.add("young", 12, max_tokens=2)
    while old.state is State.RUNNING:
        assert residencies(paused) == [Residency.DIRTY] * 2
        assert young.generated == 0
        desk.step()
    desk.drain()
    assert young.state is State.FINISHED


# -- the link ----------------------------------------------------------------------------------------------------------


def test_copies_stay_within_the_links_budget_unless_the_policy_waits_for_them() -> None:
    desk = Desk(CopyEverything(), link_tokens_per_s=2 * SIZE)
    paused = desk.paused("paused", 20)
    desk.prefilled("runs", 3)
    plans = desk.steps(3)
    assert [len(plan.copy_out) for plan in plans] == [2, 1, 0]
    assert residencies(paused) == [Residency.CLEAN] * 5
    synchronous = Desk(swap(), link_tokens_per_s=2 * SIZE)
    synchronous.paused("paused", 20)
    assert len(synchronous.step().copy_out) == 5


def test_fetches_take_the_link_first_and_copies_what_is_left() -> None:
    desk = Desk(CopyEverything(), num_pages=30, link_tokens_per_s=3 * SIZE)
    desk.prefilled("runs", 3, max_tokens=30)
    returning = desk.paused("returning", 16)
    desk.steps(2)
    assert residencies(returning) == [Residency.CLEAN] * 4
    for page in returning.context.pages:
        assert desk.kv.store.drop_device(page)
    desk.paused("other", 16)
    desk.scheduler.resume(returning, [5])
    moved = [(len(plan.fetch), len(plan.copy_out)) for plan in desk.steps(4)]
    assert moved == [(3, 0), (1, 2), (0, 2), (0, 0)]


def test_when_all_are_paused_a_plan_only_transfers_ten_milliseconds_at_a_time() -> None:
    desk = Desk(CopyEverything(), link_tokens_per_s=2 * SIZE / 0.010)
    desk.paused("a", 15)
    plans = desk.steps(3)
    assert [(plan.bucket, plan.chunks, len(plan.copy_out)) for plan in plans] == [(0, (), 2), (0, (), 2), (0, (), 0)]
    assert [bool(plan) for plan in plans] == [True, True, False]


def test_a_page_is_fetched_before_what_follows_it_is_computed() -> None:
    desk = Desk(swap())
    sequence = desk.paused("a", 8)
    desk.step()
    assert residencies(sequence) == [Residency.HOST] * 2
    desk.scheduler.resume(sequence, [1, 2, 3])
    first, second = desk.steps(2)
    assert (len(first.fetch), first.land, first.chunks) == (2, first.fetch, ())
    assert second.chunks[0].start == 8
    assert len(second.chunks[0].tokens) == 4
    assert sequence.recomputed == 0
    assert sequence.found == (0, 8, 0)


def test_a_hole_in_the_middle_is_recomputed_alone() -> None:
    places = [Residency.DIRTY, Residency.MISSING, Residency.HOST, Residency.CLEAN]
    desk = Desk(scripted(lambda sequence, index: places[index]))
    sequence = desk.paused("a", 16)
    desk.step()
    assert residencies(sequence) == places
    desk.scheduler.resume(sequence, [1, 2])
    hole, rest = desk.steps(2)
    assert [(chunk.start, len(chunk.tokens), chunk.sample) for chunk in hole.chunks] == [(4, 4, None)]
    assert [copy.device_slot for copy in hole.fetch] == [sequence.context.pages[2].device]
    assert [(chunk.start, len(chunk.tokens)) for chunk in rest.chunks] == [(16, 3)]
    assert (sequence.recomputed, sequence.found) == (4, (8, 4, 4))
    desk.drain()


# -- depth 1 -----------------------------------------------------------------------------------------------------------


def test_at_depth_one_a_plan_goes_on_from_a_token_that_only_the_device_knows() -> None:
    desk = Desk(preserve(), depth=1)
    sequence = desk.add("a", 3, max_tokens=4)
    plans = desk.steps(4)
    assert [chunk.tokens for plan in plans for chunk in plan.chunks][1:] == [(FROM_DEVICE,)] * 3
    assert [chunk.sample.position for plan in plans for chunk in plan.chunks if chunk.sample] == [3, 4, 5, 6]
    assert sequence.generated == 3
    desk.drain()
    assert desk.num_wasted == 0


def test_a_call_detected_late_wastes_one_sample_and_keeps_its_own_tokens_kv() -> None:
    desk = Desk(preserve(), depth=1)
    sequence = desk.prefilled("a", 3)
    desk.scheduler.intercept(sequence, 0.0)
    known = len(sequence.tokens)
    assert not desk.step()
    assert (desk.num_wasted, len(sequence.tokens), sequence.pending) == (1, known, 0)
    desk.scheduler.resume(sequence, [1, 2, 3])
    (chunk,) = desk.step().chunks
    assert (chunk.start, chunk.tokens) == (known, (1, 2, 3))
    desk.drain()
    assert (desk.num_wasted, sequence.recomputed) == (1, 0)


def test_a_preempted_sequence_waits_for_its_sample_in_flight() -> None:
    desk = Desk(improved_discard(), num_pages=6, depth=1)
    old = desk.add("old", 8, max_tokens=10)
    young = desk.add("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert (old.generated, young.generated, desk.num_wasted) == (10, 10, 0)


# -- plans -------------------------------------------------------------------------------------------------------------


def workload(policy: Policy, depth: int) -> list[StepPlan]:
    desk = Desk(policy, num_pages=9, num_host_pages=4, max_num_seqs=3, depth=depth, link_tokens_per_s=10.0)
    sequences = [desk.add(f"{index}", 3 + 5 * index % 20, max_tokens=6) for index in range(8)]
    for number in range(60):
        desk.step()
        running = [sequence for sequence in desk.scheduler.running if sequence.generated]
        if number % 3 == 0 and running:
            desk.scheduler.intercept(running[number % len(running)], 0.0)
        if number % 5 == 0 and desk.scheduler.intercepted:
            desk.scheduler.resume(next(iter(desk.scheduler.intercepted.values())), [number % VOCAB, 1])
    for sequence in list(desk.scheduler.intercepted.values()):
        desk.scheduler.resume(sequence, [2])
    desk.drain()
    assert all(sequence.state is State.FINISHED for sequence in sequences)
    return desk.runner.plans


def test_the_same_events_make_the_same_plans() -> None:
    for policy in (preserve, swap, discard, improved_discard, CopyEverything):
        for depth in (0, 1):
            assert workload(policy(), depth) == workload(policy(), depth)


def test_a_printed_plan_is_the_whole_plan() -> None:
    nouns = {"StepPlan": StepPlan, "Chunk": Chunk, "Sample": Sample, "PageCopy": PageCopy}
    plans = workload(swap(), 1)
    assert {bool(plan.fetch) for plan in plans} == {bool(plan.copy_out) for plan in plans} == {True, False}
    assert [eval(repr(plan), nouns) for plan in plans] == plans
    assert [plan.number for plan in plans] == list(range(len(plans)))


def test_finishing_frees_the_pages_in_every_state_at_once() -> None:
    for state in State:
        desk = Desk(preserve(), num_pages=8, max_num_seqs=1)
        desk.prefilled("other", 3) if state is State.WAITING else None
        sequence = desk.add("a", 9) if state is State.WAITING else desk.prefilled("a", 9)
        if state is State.INTERCEPTED:
            desk.scheduler.intercept(sequence, 0.0)
        if state is State.FINISHED:
            desk.scheduler.finish(sequence, 0.0)
        assert sequence.state is state
        desk.scheduler.finish(sequence, 0.0)
        assert sequence.state is State.FINISHED
        assert desk.kv.store.num_claimed == 0
        assert desk.kv.store.occupancy().used == (1 if state is State.WAITING else 0)
        assert desk.scheduler.num_unfinished == (1 if state is State.WAITING else 0)
