"""Reads a profiler's trace: what ran on which stream, the time of every operation, and when copies start.

On a GPU a stream is a line of the trace, and on a TPU the operations of a core are one (as jax's documentation has it: no trace
of a TPU was read). Elsewhere the operations that XLA runs stand for kernels, so that all that reads a trace runs everywhere.
"""

import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

DEVICE_LINES = {"/device:GPU": "Stream", "/device:TPU": "XLA Ops"}
"""How the names of planes begin that are devices', and how those of their lines that have kernels."""
Span = tuple[float, float]
"""Start and end in ns."""

INTO = "MemcpyH2D"
FILL_STEPS = 2
DRAIN_STEPS = 1
"""Steps at the start of a run in which the device waits for the host, and at its end, behind which nothing is dispatched."""
EDGE_STEPS = FILL_STEPS + DRAIN_STEPS
SIZE = re.compile(r"\bsize:(\d+)")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(", re.MULTILINE)
"""Name, shape and kind of an instruction of a compiled program."""


class Event(NamedTuple):
    """A kernel or a copy on a stream, which is a line of the trace; times in ns.

    Attributes:
        operation: of the compiled program, if the trace names it.
        num_bytes: of a copy, if the trace has them.
    """

    line: str
    name: str
    start: float
    end: float
    operation: str = ""
    num_bytes: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether a copy engine ran it; all else are kernels."""
        return self.name.startswith(("Memcpy", "Memset"))


def traced(run: Callable[[], Any]) -> list[Event]:
    """The events of the devices while a function runs; on a CPU, the operations of XLA."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        data = [jax.profiler.ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
        events = [event for each in data for plane in each.planes for event in plane_events(plane)]
    on_device = [event for event in events if event.line.startswith(tuple(DEVICE_LINES.values()))]
    return sorted(on_device or events, key=lambda event: event.start)


def traced_steps(run: Callable[[int], Any], steps: int) -> list[Event]:
    """The events of so many steps that follow each other, without those in which the pipeline fills and drains.

    Args:
        run: runs a number of steps.
    """
    return middle(traced(lambda: run(steps + EDGE_STEPS)), steps + EDGE_STEPS)


def middle(events: Sequence[Event], steps: int) -> list[Event]:
    """What runs from the first kernel after the `FILL_STEPS` to the last one before the `DRAIN_STEPS`; copies are cut there.

    Args:
        events: by their start.
        steps: that were traced, all with as many kernels.
    """
    kernels = [event for event in events if not event.is_copy]
    each = len(kernels) // steps
    kept = kernels[FILL_STEPS * each : (steps - DRAIN_STEPS) * each]
    if not kept:
        return []
    start, end = kept[0].start, max(event.end for event in kept)
    copies = [event for event in events if event.is_copy and event.start < end and event.end > start]
    cut = [copy._replace(start=max(copy.start, start), end=min(copy.end, end)) for copy in copies]
    return sorted([*kept, *cut], key=lambda event: event.start)


def plane_events(plane: Any) -> list[Event]:
    """What a plane's streams have, or the operations of a CPU's threads."""
    lines = next((line for device, line in DEVICE_LINES.items() if plane.name.startswith(device)), None)
    events = list[Event]()
    for line in plane.lines:
        if lines is not None and not line.name.startswith(lines):
            continue
        for event in line.events:
            stats = {name: value for name, value in event.stats if name in ("hlo_op", "memcpy_details")}
            if lines is not None or "hlo_op" in stats:
                size = SIZE.search(str(stats.get("memcpy_details", "")))
                span = event.start_ns, event.start_ns + event.duration_ns
                instruction = INSTRUCTION.match(event.name)  # the name of a TPU's event is its text
                name = event.name if instruction is None else instruction[1]
                operation = str(stats.get("hlo_op", "" if instruction is None else name))
                events.append(Event(line.name, name, *span, operation, int(size[1]) if size else 0))
    return events


def operations(events: Iterable[Event], programs: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The time of every operation, the longest first: `operation`, `kernel`, `shape`, `calls` and `gpu_s` of a step.

    Args:
        programs: texts of the compiled programs; where several have an operation of that name, each has its shape.
        count: steps that were traced.
    """
    shapes: dict[str, list[str]] = {}
    for program in programs:
        for name, shape, kind in dict.fromkeys(INSTRUCTION.findall(program)):
            shapes.setdefault(name, []).append(f"{kind} {shape.strip('(').split('{')[0]}")
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        groups.setdefault((event.operation, event.name), []).append(event)
    rows = [
        {
            "operation": operation,
            "kernel": kernel,
            "shape": " or ".join(dict.fromkeys(shapes.get(operation, ()))),
            "calls": len(group) / count,
            "gpu_s": sum(event.end - event.start for event in group) / count / 1e9,
        }
        for (operation, kernel), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["gpu_s"])


def gaps(spans: Iterable[Span]) -> dict[str, float]:
    """What of the time between the first start and the last end no span covers."""
    busy = merged(spans)
    length = busy[-1][1] - busy[0][0]
    idle = [after - before for (_, before), (after, _) in pairwise(busy)]
    return {
        "idle_share": sum(idle) / length,
        "busy_s": (length - sum(idle)) / 1e9,
        "largest_gap_s": max(idle, default=0.0) / 1e9,
    }


def until_first_kernel_s(events: Sequence[Event], steps: int, least_bytes: int) -> float | None:
    """Seconds from the start of a step's fetch to the first kernel that starts after it, the median; None without a fetch.

    Args:
        events: of steps that do not overlap, by their start.
        steps: how many there are.
        least_bytes: of the arrays that are fetched; a smaller copy uploads the step's own numbers.
    """
    arrays = [event.start for event in events if event.name == INTO and event.num_bytes >= least_bytes]
    kernels = [event.start for event in events if not event.is_copy]
    fetches = arrays[:: max(1, len(arrays) // steps)]
    places = [(start, bisect_left(kernels, start)) for start in fetches]
    waits = [kernels[place] - start for start, place in places if place < len(kernels)]
    return median(waits) / 1e9 if waits else None


def array_starts_s(events: Sequence[Event], least_bytes: int) -> tuple[float, float] | None:
    """Seconds from a step's first kernel to the start of the first and of the last array that it fetches, medians over steps
    that follow each other; None without a fetch. A fetch that waits for its step's compute starts late.

    Args:
        events: by their start; every step uploads its numbers, then come its first kernel and its arrays.
        least_bytes: of the arrays that are fetched.
    """
    coming = [event for event in events if event.name == INTO]
    uploads = [event.end for event in coming if event.num_bytes < least_bytes]
    arrays = [event.start for event in coming if event.num_bytes >= least_bytes]
    kernels = [event.start for event in events if not event.is_copy]
    each = len(arrays) // max(1, len(uploads))
    if not each or not kernels:
        return None
    firsts = [kernels[min(bisect_left(kernels, end), len(kernels) - 1)] for end in uploads]
    waits = [[start - first for start in arrays[each * step : each * (step + 1)]] for step, first in enumerate(firsts)]
    return median(wait[0] for wait in waits) / 1e9, median(wait[-1] for wait in waits) / 1e9


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
