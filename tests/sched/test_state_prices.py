"""What policies see of contexts with states of recurrent layers: whole contexts, with the memory of their states."""

import pytest

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.kv.states import StateSizes
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.min_waste import MinWaste
from jinfercept.sched.policy import Policy, preserve
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import chunked_discard_waste, preserve_waste
from jinfercept.testing.fake_runner import FakeRunner
from tests.support.fake_engine import POLICIES, AffineCost

SIZE, BUCKET = 4, 16


class Desk:
    """A scheduler of a model with recurrent layers, whose results come at once."""

    def __init__(self, policy: Policy, num_pages: int = 20, num_states: int = 3, max_num_seqs: int = 2) -> None:
        self.kv = KVManager(num_pages, 0, SIZE, states=StateSizes(num_states, 0, 10))
        limits = {"buckets": (BUCKET,), "max_num_seqs": max_num_seqs, "max_model_len": 60, "chunk_tokens": BUCKET}
        self.scheduler = Scheduler(self.kv, policy, AffineCost(), ElapsedEstimator(), **limits)
        self.runner, self.now = FakeRunner(SIZE, (BUCKET,), has_states=True), 0.0

    def add(self, name: str, num_tokens: int) -> Sequence:
        first = len(self.scheduler.unfinished)  # so that no two share pages
        sequence = Sequence(name, [first, *[7] * (num_tokens - 1)], self.kv.open(), max_tokens=30)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        self.now += 1.0
        planned = self.scheduler.plan(self.now)
        tokens = self.runner.submit(planned.plan).tokens
        for (sequence, *_), token in zip(planned.sampled, tokens, strict=True):
            self.scheduler.accept(sequence, token)
        self.kv.check([sequence.context for sequence in self.scheduler.unfinished])

    def paused(self, name: str, num_tokens: int) -> Sequence:
        sequence = self.add(name, num_tokens)
        while not sequence.generated:
            self.step()
        self.scheduler.intercept(sequence, self.now)
        return sequence


def has_state(sequence: Sequence) -> bool:
    return sequence.context.state_tokens > 0


def test_a_state_is_held_and_is_there_while_a_context_is_recomputed() -> None:
    assert chunked_discard_waste(40, 0, 10, lambda tokens: 0.5 * tokens, state=10) == pytest.approx(20 * (20 + 10))
    policy = MinWaste(ElapsedEstimator(), lambda tokens: 0.1 * tokens, BUCKET, SIZE, 0.0)
    desk = Desk(policy)
    sequence = desk.paused("a", 9)
    [verdict] = policy._verdicts(desk.now + 2.0)
    assert verdict.tokens == 9 + 10
    assert verdict.preserve == preserve_waste(2.0, 19)
    assert sequence.state is State.INTERCEPTED


@pytest.mark.parametrize("name", POLICIES)
def test_a_sequence_that_starts_takes_the_state_of_a_paused_one_where_none_is_free(name: str) -> None:
    desk = Desk(POLICIES[name]())
    paused = [desk.paused(f"paused {index}", 9) for index in range(3)]
    started = desk.add("new", 9)
    for _ in range(3):
        desk.step()
    assert has_state(started)
    lost = [sequence for sequence in paused if not has_state(sequence)]
    assert lost or name == "preserve"
    for sequence in lost:
        assert {run.residency for run in sequence.context.runs()} <= {Residency.MISSING}


def test_paused_states_are_protected_while_a_sequence_runs() -> None:
    desk = Desk(preserve(), num_states=2)
    desk.add("runs", 9)
    desk.step()
    paused = desk.paused("paused", 9)
    waits = desk.add("waits", 9)
    desk.step()
    assert waits.state is State.WAITING
    assert has_state(paused)
