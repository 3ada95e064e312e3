"""The order of the least worthy blocks is kept from plan to plan, and is the one that all blocks looked at anew would have."""

from jinfercept.kv.manager import KVManager
from jinfercept.sched.copy_ahead import LeastWorth, PageBlock
from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.sequence import PendingCall, Sequence, State
from jinfercept.sim.simulation import OracleEstimator


class Paused:
    """Sequences that pause at 0 s, each for a time of its own, and the price of a token of each."""

    def __init__(self, calls_s: list[float]) -> None:
        estimator, kv = OracleEstimator(), KVManager(1, 0, 4)
        self.order, self.prices, self.num_looks = LastExpectedFirst(estimator), [1.0] * len(calls_s), 0
        self.sequences = [Sequence(str(number), [1], kv.open(), max_tokens=1) for number in range(len(calls_s))]
        self.least = LeastWorth(self.order, self.block)
        for sequence, call_s in zip(self.sequences, calls_s, strict=True):
            sequence.state, call = State.INTERCEPTED, PendingCall("tool", sequence.id, call_s)
            sequence.calls = sequence.awaited = (call,)
            estimator.started(call, 0.0)
            self.order.add(sequence, 0.0)
            self.least.put(sequence, 0.0)

    def block(self, sequence: Sequence, now: float) -> PageBlock | None:
        self.num_looks += 1
        price = self.prices[int(sequence.id)]
        worth = price / max(1e-3, self.order.expected_s(sequence) - now)
        return PageBlock(worth, sequence, range(1)) if price else None

    def first(self, now: float) -> str | None:
        block = self.least.first(now)
        return block and block.sequence.id


def test_time_changes_the_order_of_blocks() -> None:
    paused = Paused([100.0, 1000.0])
    paused.prices[:] = [1.0, 20.0]
    for sequence in paused.sequences:
        paused.least.put(sequence, 0.0)
    assert paused.first(0.0) == "0"
    assert paused.first(90.0) == "1"


def test_a_block_that_has_become_cheaper_comes_first_and_one_without_pages_not_at_all() -> None:
    paused = Paused([100.0, 200.0, 300.0])
    assert paused.first(0.0) == "2"
    paused.prices[0] = 0.1
    paused.least.put(paused.sequences[0], 1.0)
    assert paused.first(1.0) == "0"
    paused.prices[0] = 0.0
    assert paused.first(1.0) == "2"


def test_a_skipped_sequence_is_left_out_until_the_order_begins_anew() -> None:
    paused = Paused([100.0, 200.0])
    paused.least.skip(paused.sequences[1], 0.0)
    assert paused.first(0.0) == "0"
    paused.least.restart()
    assert paused.first(0.0) == "1"


def test_finding_the_first_block_looks_at_few_sequences_however_many_are_paused() -> None:
    paused = Paused([100.0 + 10.0 * number for number in range(300)])
    paused.num_looks = 0
    for step in range(100):
        paused.least.restart()
        assert paused.first(0.025 * step) == "299"
    assert paused.num_looks <= 400
