"""Reads a profiler's trace of a GPU: what ran on which stream, and what of the copies between host and device kernels hid."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

Span = tuple[float, float]
"""Start and end in ns."""


class Event(NamedTuple):
    """A kernel or a copy on a stream, which is a line of the trace; times in ns."""

    line: str
    name: str
    start: float
    end: float

    @property
    def is_copy(self) -> bool:
        """Whether a copy engine ran it; all else are kernels."""
        return self.name.startswith(("Memcpy", "Memset"))


def traced(run: Callable[[], Any]) -> list[Event]:
    """The events of the GPU's streams while a function runs; none without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return [
            Event(line.name, event.name, event.start_ns, event.start_ns + event.duration_ns)
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


def copies(events: Sequence[Event]) -> list[dict[str, Any]]:
    """For each kind of copy (`MemcpyD2H`): `count`, `busy_s`, `hidden_share` (under kernels), and the `lines` that it has."""
    kernels = merged((event.start, event.end) for event in events if not event.is_copy)
    found = []
    for kind in sorted({event.name for event in events if event.is_copy}):
        mine = [event for event in events if event.name == kind]
        spans = merged((event.start, event.end) for event in mine)
        busy = sum(end - start for start, end in spans)
        found.append(
            {
                "copy": kind,
                "count": len(mine),
                "busy_s": busy / 1e9,
                "hidden_share": overlap(spans, kernels) / busy if busy else 0.0,
                "lines": sorted({event.line for event in mine}),
            }
        )
    return found


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long both last at once, in ns; each has spans that do not touch, in order."""
    total, index = 0.0, 0
    for start, end in one:
        while index < len(other) and other[index][1] <= start:
            index += 1
        for first, last in other[index:]:
            if first >= end:
                break
            total += min(end, last) - max(start, first)
    return total
