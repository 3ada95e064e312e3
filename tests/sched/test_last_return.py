"""When the last of several asynchronous calls returns."""

import pytest

from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import remaining_s
from jinfercept.sched.sequence import PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator


def waiting(*calls: PendingCall) -> Sequence:
    sequence = Sequence("s", [1], KVManager(4, 0, 4).open(), max_tokens=1)
    sequence.calls = sequence.awaited = calls
    return sequence


def test_a_call_that_has_returned_is_waited_for_no_more() -> None:
    oracle = OracleEstimator()
    calls = [PendingCall("t", i, expected_s=seconds, head_start_s=1.0) for i, seconds in enumerate((3.0, 9.0))]
    for call in calls:
        oracle.started(call, 0.0)
    sequence = waiting(*calls)
    assert remaining_s(oracle, sequence, 0.5) == pytest.approx(7.5)
    sequence.awaited = (calls[0],)
    assert remaining_s(oracle, sequence, 0.5) == 1.5
