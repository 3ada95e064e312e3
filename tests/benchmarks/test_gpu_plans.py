"""The GPU suite's step times are those of a pipeline that is full: dispatching a first step and waiting for a last copy do not
count, and copies that never catch up do."""

from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_suite.sizes import FULL
from benchmarks.suite.idle import prefill_steps, timed_steps
from benchmarks.suite.plans import MOST_TURN_S, StepTimes, mean_times, run_steps, steady_s
from jinfercept.events import Event, Token
from jinfercept.sched.plan import StepPlan


class FakeEngine:
    """Gives one token of so many rows in each step."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = iter(rows)

    def step(self) -> list[Event]:
        return [Token(str(row), 0, "") for row in range(next(self.rows))]


def test_a_timed_step_with_fewer_rows_is_an_error() -> None:
    assert timed_steps(FakeEngine([4, 4]), 2, 4) >= 0
    with pytest.raises(AssertionError, match=r"steps of \[4, 3\] rows were timed, not of 4"):
        timed_steps(FakeEngine([4, 3]), 2, 4)


def test_requests_decode_until_the_last_prompt_is_computed() -> None:
    assert prefill_steps(1, 100, 32) == 4
    assert prefill_steps(2, 100, 32) == 8  # the second beside a row that decodes, in chunks of 31
    assert prefill_steps(4, 10, 4) == 3 + 4 + 5 + 10
    assert prefill_steps(*FULL.transfer_rows, FULL.policies.bucket) == 179


class FakeDevice:
    """Computes a step and copies its pages out beside the next ones, in virtual seconds; the host dispatches in 3 ms."""

    def __init__(self, step_s: float, copy_s: float = 0.0) -> None:
        self.step_s, self.copy_s = step_s, copy_s
        self.now_s = self.computed_s = self.copied_s = 0.0
        self.in_flight = [0.0, 0.0]
        self.num_steps = 0
        self.kv = SimpleNamespace(wait=self.wait)

    def submit(self, plan: StepPlan) -> float:
        self.num_steps += 1
        self.now_s = max(self.now_s, self.in_flight.pop(0)) + 0.003
        start = max(self.now_s, self.computed_s)
        self.computed_s, self.copied_s = start + self.step_s, max(start, self.copied_s) + self.copy_s
        self.in_flight.append(self.copied_s)
        return self.computed_s

    def collect(self, ticket: float) -> None:
        self.now_s = max(self.now_s, ticket)

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.copied_s)


@pytest.mark.parametrize(("copy_s", "expected_s"), [(0.0, 0.010), (0.009, 0.010), (0.011, 0.011), (0.015, 0.015)])
def test_a_step_takes_what_its_compute_or_its_copies_take(copy_s: float, expected_s: float) -> None:
    device: Any = FakeDevice(0.010, copy_s)
    seconds, dispatch_s = steady_s(device, repeat(StepPlan(0, 0)), 30, lambda: device.now_s)
    assert seconds == pytest.approx(expected_s)
    assert dispatch_s >= 0.003
    assert device.now_s == max(device.computed_s, device.copied_s), "nothing is in flight afterwards"


def test_a_step_takes_the_hosts_time_where_that_is_longer() -> None:
    device: Any = FakeDevice(0.001)
    assert steady_s(device, repeat(StepPlan(0, 0)), 30, lambda: device.now_s) == pytest.approx((0.003, 0.003))


def test_slow_steps_are_fewer() -> None:
    device: Any = FakeDevice(0.1)
    assert steady_s(device, repeat(StepPlan(0, 0)), 30, lambda: device.now_s)[0] == pytest.approx(0.1)
    assert device.now_s < 5 * MOST_TURN_S


def test_a_mean_begins_with_the_collection_of_the_step_before() -> None:
    device: Any = FakeDevice(0.010, 0.5)
    times = run_steps(device, repeat(StepPlan(0, 0)), 2, lambda: device.now_s)
    assert [step.collected_s for step in times] == pytest.approx([0.013, 0.023])
    times = [StepTimes(*values) for values in ((9.0, 8.0), (10.0, 1.0), (12.0, 3.0))]
    assert mean_times(times, 1, 2) == (1.5, 2.0)
