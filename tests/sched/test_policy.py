"""Where each simple policy puts a paused context, and what it gives when somebody needs a page."""

import pytest

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.policy import Policy, discard, improved_discard, preserve, swap
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import Sequence, State
from tests.support.fake_engine import AffineCost, FakeRunner

SIZE = 4
DIRTY, CLEAN, HOST, MISSING = Residency.DIRTY, Residency.CLEAN, Residency.HOST, Residency.MISSING


class Desk:
    """A scheduler on pages of four tokens whose results come at once."""

    def __init__(self, policy: Policy, num_pages: int = 20, num_host_pages: int = 20, max_num_seqs: int = 4) -> None:
        self.kv = KVManager(num_pages, num_host_pages, SIZE)
        self.scheduler = Scheduler(
            self.kv,
            policy,
            AffineCost(),
            ElapsedEstimator(),
            buckets=(16,),
            max_num_seqs=max_num_seqs,
            max_model_len=num_pages * SIZE,
            chunk_tokens=16,
        )
        self.runner = FakeRunner(SIZE, (16,))
        self.num_added = 0

    def add(self, num_tokens: int, max_tokens: int = 30) -> Sequence:
        self.num_added += 1
        sequence = Sequence(f"{self.num_added}", [self.num_added] * num_tokens, self.kv.open(), max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        planned = self.scheduler.plan(0.0)
        tokens = self.runner.submit(planned.plan).tokens
        for (sequence, *_), token in zip(planned.sampled, tokens, strict=True):
            self.scheduler.accept(sequence, token)
            if sequence.generated == sequence.max_tokens:
                self.scheduler.finish(sequence, 0.0)
        self.kv.check([sequence.context for sequence in self.scheduler.unfinished])

    def paused(self, num_tokens: int, *, planned: bool = True) -> Sequence:
        """A sequence that was intercepted after its first token, one plan ago."""
        sequence = self.add(num_tokens)
        while not sequence.generated:
            self.step()
        self.scheduler.intercept(sequence, 0.0)
        if planned:
            self.step()
        return sequence


def residencies(sequence: Sequence) -> list[Residency]:
    return [run.residency for run in sequence.context.runs() for _ in run.pages]


@pytest.mark.parametrize(
    ("policy", "expected"), [(discard, MISSING), (improved_discard, MISSING), (preserve, DIRTY), (swap, HOST)]
)
def test_every_policy_has_its_place_for_a_paused_context(policy: type[Policy], expected: Residency) -> None:
    desk = Desk(policy())
    sequence = desk.paused(10)
    assert residencies(sequence) == [expected] * 3
    assert desk.kv.occupancy().free == (17 if expected is DIRTY else 20)
    assert desk.kv.occupancy().host == (3 if expected is HOST else 0)


def test_a_page_that_somebody_else_uses_stays_where_it_is() -> None:
    for policy in (discard, swap):
        desk = Desk(policy())
        other = Sequence("other", [1] * 10, desk.kv.open(), max_tokens=9)
        desk.scheduler.add(other)
        desk.step()
        sequence = desk.paused(10)  # the first that is added here has the same tokens
        assert sequence.tokens[:10] == other.tokens[:10]
        assert residencies(sequence)[:2] == [DIRTY] * 2
        assert residencies(sequence)[2] is not DIRTY


def test_a_full_host_makes_swap_discard() -> None:
    desk = Desk(swap(), num_host_pages=2)
    sequence = desk.paused(14)
    assert residencies(sequence) == [HOST, HOST, MISSING, MISSING]
    assert desk.kv.occupancy().free == 20
    desk.scheduler.resume(sequence, [1, 2])
    while sequence.state is not State.FINISHED:
        desk.step()
    assert (sequence.usage.copied_in, sequence.usage.recomputed) == (8, 6)


def test_preserve_loses_the_youngest_context_tail_first_and_only_when_nobody_else_could_run() -> None:
    desk = Desk(preserve(), num_pages=8)
    old, young = desk.paused(8), desk.paused(12)
    desk.add(16, max_tokens=2)
    desk.step()
    assert residencies(old) == [DIRTY] * 2
    assert residencies(young) == [DIRTY, DIRTY, MISSING]


def test_preserve_keeps_what_the_others_do_not_need() -> None:
    desk = Desk(preserve(), num_pages=8)
    sequence = desk.paused(8)
    other = desk.add(4, max_tokens=10)
    while other.state is not State.FINISHED:
        assert residencies(sequence) == [DIRTY] * 2
        desk.step()
    desk.scheduler.resume(sequence, [1])
    desk.step()
    assert sequence.usage.residency == (8, 0, 0)


def test_preserve_keeps_a_context_whose_call_returned_before_the_next_plan() -> None:
    desk = Desk(preserve(), max_num_seqs=1)
    old = desk.paused(4)
    young = desk.paused(8, planned=False)
    desk.scheduler.resume(young, [1])
    desk.scheduler.resume(old, [1])
    desk.step()
    assert (old.state, young.state) == (State.RUNNING, State.WAITING)
    assert residencies(young) == [DIRTY] * 2


def test_a_context_is_placed_once_and_stays_there_while_it_waits() -> None:
    for policy, expected in ((preserve, DIRTY), (swap, HOST)):
        desk = Desk(policy(), max_num_seqs=1)
        sequence = desk.paused(8)
        desk.add(4, max_tokens=3)
        desk.step()
        desk.scheduler.resume(sequence, [1])
        desk.step()
        assert sequence.state is State.WAITING
        assert residencies(sequence) == [expected] * 2
