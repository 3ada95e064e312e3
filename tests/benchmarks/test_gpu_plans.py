"""What the GPU suite reads: traces of a profiler, and times of steps in a pipeline that is full.

Dispatching a first step and waiting for a last copy do not count, and copies that never catch up do.
"""

from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_suite.kind import FULL
from benchmarks.suite.idle import prefill_steps, timed_steps
from benchmarks.suite.plans import steady_s
from benchmarks.suite.trace import (
    Event as TraceEvent,
)
from benchmarks.suite.trace import (
    array_starts_s,
    gaps,
    operations,
    plane_events,
    until_first_kernel_s,
)
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


def test_the_streams_of_a_gpu_are_read_with_operations_and_the_bytes_of_copies() -> None:
    copied = {"memcpy_details": "kind_src:pinned kind_dst:device size:2097152 dest:0 async:1", "context_id": 3}
    stream = traced_line("Stream #20(MemcpyH2D)", "MemcpyH2D", copied)
    plane = SimpleNamespace(
        name="/device:GPU:0", lines=[stream, traced_line("XLA Ops", "fusion", {"hlo_op": "fusion"})]
    )
    assert plane_events(plane) == [TraceEvent("Stream #20(MemcpyH2D)", "MemcpyH2D", 5.0, 12.0, "", 2097152)]
    host = SimpleNamespace(name="/host:CPU", lines=[traced_line("Worker", "dot", {"hlo_op": "dot.3"}), stream])
    assert plane_events(host) == [TraceEvent("Worker", "dot", 5.0, 12.0, "dot.3")]


def traced_line(line: str, name: str, stats: dict[str, Any]) -> SimpleNamespace:
    event = SimpleNamespace(name=name, start_ns=5.0, duration_ns=7.0, stats=list(stats.items()))
    return SimpleNamespace(name=line, events=[event])


def test_idle_time_is_what_no_kernel_of_any_stream_covers() -> None:
    measured = gaps([(0.0, 4e9), (6e9, 10e9), (1e9, 5e9), (9e9, 10e9)])
    assert measured == {"idle_share": 0.1, "busy_s": 9.0, "largest_gap_s": 1.0}


def test_operations_have_the_shapes_of_their_programs_and_the_time_of_a_step() -> None:
    program = """
  %gemm_fusion_dot.3 = bf16[64,6144]{1,0} fusion(%a, %b), kind=kCustom
  ROOT %custom-call.5 = (bf16[64,4096]{1,0}, s8[4194304]{0}) custom-call(%c), custom_call_target="__cublas$gemm"
"""
    kernels = [
        TraceEvent("Stream #1", "nvjet_tst", 0.0, 3e9, "custom-call.5"),
        TraceEvent("Stream #1", "gemm_fusion_dot_3", 3e9, 4e9, "gemm_fusion_dot.3"),
        TraceEvent("Stream #1", "nvjet_tst", 4e9, 9e9, "custom-call.5"),
    ]
    first, second = operations(kernels, [program], 2)
    assert (first["kernel"], first["shape"], first["calls"]) == ("nvjet_tst", "custom-call bf16[64,4096]", 1.0)
    assert (first["gpu_s"], second["gpu_s"]) == (4.0, 0.5)
    assert second["shape"] == "fusion bf16[64,6144]"


def test_the_first_kernel_counts_from_the_fetch_and_not_from_the_upload_before_it() -> None:
    def step(start: float) -> list[TraceEvent]:
        uploaded, *pages = (
            TraceEvent("Stream #2", "MemcpyH2D", start + at, start + at + 1e9, num_bytes=size)
            for at, size in ((0.0, 640), (1e9, 4096), (2e9, 4096))
        )
        kernels = [
            TraceEvent("Stream #1", "embed", start + 1.5e9, start + 1.6e9),
            TraceEvent("Stream #1", "layers", start + 4e9, start + 5e9),
        ]
        return [uploaded, pages[0], kernels[0], pages[1], kernels[1]]

    events = [event for number in range(3) for event in step(10e9 * number)]
    assert until_first_kernel_s(events, 3, 4096) == 0.5
    assert until_first_kernel_s(events, 3, 8192) is None


def test_the_arrays_of_a_step_count_from_its_first_kernel() -> None:
    def step(start: float) -> list[TraceEvent]:
        kernel = TraceEvent("Stream #1", "embed", start + 2e9, start + 9e9)
        moved = [TraceEvent("Stream #2", "MemcpyH2D", start, start + 1e9, num_bytes=640)]
        moved += [
            TraceEvent("Stream #3", "MemcpyH2D", start + at, start + at + 1e9, num_bytes=4096) for at in (1.5e9, 6e9)
        ]
        return [*moved, kernel]

    events = sorted((event for number in range(3) for event in step(10e9 * number)), key=lambda event: event.start)
    assert array_starts_s(events, 4096) == (-0.5, 4.0)
    assert array_starts_s(events, 8192) is None
