"""What the GPU suite reads in the traces of a profiler."""

from types import SimpleNamespace
from typing import Any

from benchmarks.suite.trace import (
    Event,
    array_starts_s,
    gaps,
    middle,
    operations,
    plane_events,
    until_first_kernel_s,
)


def test_the_streams_of_a_gpu_are_read_with_operations_and_the_bytes_of_copies() -> None:
    copied = {"memcpy_details": "kind_src:pinned kind_dst:device size:2097152 dest:0 async:1", "context_id": 3}
    stream = traced_line("Stream #20(MemcpyH2D)", "MemcpyH2D", copied)
    plane = SimpleNamespace(
        name="/device:GPU:0", lines=[stream, traced_line("XLA Ops", "fusion", {"hlo_op": "fusion"})]
    )
    assert plane_events(plane) == [Event("Stream #20(MemcpyH2D)", "MemcpyH2D", 5.0, 12.0, "", 2097152)]
    host = SimpleNamespace(name="/host:CPU", lines=[traced_line("Worker", "dot", {"hlo_op": "dot.3"}), stream])
    assert plane_events(host) == [Event("Worker", "dot", 5.0, 12.0, "dot.3")]


def traced_line(line: str, name: str, stats: dict[str, Any]) -> SimpleNamespace:
    event = SimpleNamespace(name=name, start_ns=5.0, duration_ns=7.0, stats=list(stats.items()))
    return SimpleNamespace(name=line, events=[event])


def test_idle_time_is_what_no_kernel_of_any_stream_covers() -> None:
    measured = gaps([(0.0, 4e9), (6e9, 10e9), (1e9, 5e9), (9e9, 10e9)])
    assert measured == {"idle_share": 0.1, "busy_s": 9.0, "largest_gap_s": 1.0}


def test_the_first_two_steps_and_the_last_one_are_left_out_of_a_trace() -> None:
    """Steps of two kernels each and 10 ns, the first behind a gap; copies that reach into the middle are cut."""
    kernels = [
        Event("Stream #1", name, 10.0 * step + at, 10.0 * step + at + 4.0)
        for step in (-3, 1, 2, 3, 4)
        for at, name in ((0.0, "layers"), (5.0, "head"))
    ]
    moved = [Event("Stream #2", "MemcpyD2H", *span) for span in ((-20.0, 0.0), (15.0, 25.0), (30.0, 60.0))]
    kept = middle(sorted([*kernels, *moved], key=lambda event: event.start), 5)
    assert [event.name for event in kept if not event.is_copy] == ["layers", "head"] * 2
    assert [(event.start, event.end) for event in kept if event.is_copy] == [(20.0, 25.0), (30.0, 39.0)]
    assert gaps((event.start, event.end) for event in kept if not event.is_copy)["largest_gap_s"] == 1e-9
    assert middle([], 5) == middle(moved, 5) == []


def test_operations_have_the_shapes_of_their_programs_and_the_time_of_a_step() -> None:
    program = """
  %gemm_fusion_dot.3 = bf16[64,6144]{1,0} fusion(%a, %b), kind=kCustom
  ROOT %custom-call.5 = (bf16[64,4096]{1,0}, s8[4194304]{0}) custom-call(%c), custom_call_target="__cublas$gemm"
"""
    kernels = [
        Event("Stream #1", "nvjet_tst", 0.0, 3e9, "custom-call.5"),
        Event("Stream #1", "gemm_fusion_dot_3", 3e9, 4e9, "gemm_fusion_dot.3"),
        Event("Stream #1", "nvjet_tst", 4e9, 9e9, "custom-call.5"),
    ]
    first, second = operations(kernels, [program], 2)
    assert (first["kernel"], first["shape"], first["calls"]) == ("nvjet_tst", "custom-call bf16[64,4096]", 1.0)
    assert (first["gpu_s"], second["gpu_s"]) == (4.0, 0.5)
    assert second["shape"] == "fusion bf16[64,6144]"


def test_the_first_kernel_counts_from_the_fetch_and_not_from_the_upload_before_it() -> None:
    def step(start: float) -> list[Event]:
        uploaded, *pages = (
            Event("Stream #2", "MemcpyH2D", start + at, start + at + 1e9, num_bytes=size)
            for at, size in ((0.0, 640), (1e9, 4096), (2e9, 4096))
        )
        kernels = [
            Event("Stream #1", "embed", start + 1.5e9, start + 1.6e9),
            Event("Stream #1", "layers", start + 4e9, start + 5e9),
        ]
        return [uploaded, pages[0], kernels[0], pages[1], kernels[1]]

    events = [event for number in range(3) for event in step(10e9 * number)]
    assert until_first_kernel_s(events, 3, 4096) == 0.5
    assert until_first_kernel_s(events, 3, 8192) is None


def test_the_arrays_of_a_step_count_from_its_first_kernel() -> None:
    def step(start: float) -> list[Event]:
        kernel = Event("Stream #1", "embed", start + 2e9, start + 9e9)
        moved = [Event("Stream #2", "MemcpyH2D", start, start + 1e9, num_bytes=640)]
        moved += [Event("Stream #3", "MemcpyH2D", start + at, start + at + 1e9, num_bytes=4096) for at in (1.5e9, 6e9)]
        return [*moved, kernel]

    events = sorted((event for number in range(3) for event in step(10e9 * number)), key=lambda event: event.start)
    assert array_starts_s(events, 4096) == (-0.5, 4.0)
    assert array_starts_s(events, 8192) is None
