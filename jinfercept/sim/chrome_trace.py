"""A run as a Chrome trace, for Perfetto and chrome://tracing: a track for each request, counters for memory, link and steps.

    requests   a track each, from arrival to end, of spans `waiting`, `running` and `intercepted`; their arguments say where
               the context was when the span began and ended (tokens on the device, only on the host, missing) and, for
               pauses, which interception, which tools and what the policy did, and on the track an instant for each kind of
               move in a plan. Residency is no counter: a track more per request would bury the rest
    device     pages by kind (they add up to the pool); host pages
    link       tokens out and in, beside what the step could hide
    step       query tokens, of them recomputed, beside the saturation point

Times are microseconds of the engine's clock since the trace was opened. Events are written as they end; memory holds the
requests that are not finished.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from jinfercept.kv.manager import KVManager
from jinfercept.meter.request_log import Ended, LogEvent, Moved, Passed, Paused, Queued, Started, Stepped
from jinfercept.sched.cost import CostModel
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.step_budget import IDLE_STEP_S
from jinfercept.sim.decision_records import open_record

_ENGINE, _REQUESTS = 1, 2  # the two processes that the trace shows


@dataclass(slots=True)
class _Track:
    """One unfinished request.

    Attributes:
        state: of the sequence since `start_us`.
        args: arguments of the open span.
        done: number of the open span's moves, by action and reason.
    """

    sequence: Sequence
    number: int
    state: State
    start_us: int
    args: dict[str, Any]
    done: dict[str, int] = field(default_factory=dict)


@final
class ChromeTrace:
    """Writes a Chrome trace: a fold over the engine's log.

    Args:
        path: file, overwritten.
        now: the engine's clock.
        kv: the engine's pages.
        cost: prices a step, for the link's budget.
        synchronous: transfers have no budget.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        now: Callable[[], float],
        kv: KVManager,
        cost: CostModel,
        saturation: int,
        *,
        synchronous: bool,
    ) -> None:
        self._file = open_record(path)
        self._now, self._kv, self._cost, self._saturation = now, kv, cost, saturation
        self._synchronous = synchronous
        self._began_s = now()
        self._tracks: dict[str, _Track] = {}
        self._num_tracks = 0
        self._moved: dict[tuple[int, str], dict[str, int]] = {}  # in this plan, by track and what was done
        self._counted: dict[str, dict[str, int]] = {}
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._file.write(json.dumps(_name("process_name", "engine", _ENGINE)))
        self._write(_name("process_name", "requests", _REQUESTS))

    def fold(self, event: LogEvent) -> None:
        match event:
            case Moved():
                self._move(event)
            case Stepped():
                self._step(event)
            case Passed():
                pass
            case _:
                self._enter(event)

    # -- events ----------------------------------------------------------------------------------------------------

    def _enter(self, event: Queued | Started | Paused | Ended) -> None:
        sequence, now_us = event.sequence, self._us(event.at_s)
        track = self._tracks.get(sequence.id)
        if track is None:
            self._num_tracks += 1
            track = self._tracks[sequence.id] = _Track(sequence, self._num_tracks, sequence.state, now_us, {})
            self._write(_name("thread_name", f"request {sequence.id}", _REQUESTS, track.number))
        else:
            self._end_span(track, now_us)
        track.state, track.start_us, track.done = sequence.state, now_us, {}
        if isinstance(event, Ended):
            del self._tracks[sequence.id]
        else:
            residency = sequence.context.residency(sequence.max_computed)
            track.args = _why(event) | {"at_start": residency._asdict()}

    def _move(self, event: Moved) -> None:
        move = event.move
        track = self._tracks.get(move.sequence.id)
        if track is None:
            return
        move_name = f"{move.action.value}: {move.why}"
        track.done[move_name] = track.done.get(move_name, 0) + event.run.num_pages
        entry = self._moved.setdefault((track.number, move_name), {"pages": 0, "copied_tokens": 0, "freed_pages": 0})
        entry["pages"] += event.run.num_pages
        entry["copied_tokens"] += event.copied_tokens
        entry["freed_pages"] += event.freed

    def _step(self, event: Stepped) -> None:
        planned, end_us = event.planned, self._us(event.at_s)
        plan = planned.plan
        start_us = max(0, end_us - round(event.result.elapsed_s * 1e6))
        free, used, paused, cached, _, _, host, host_total = self._kv.occupancy()
        size = self._kv.page_size
        link = {"out": len(plan.offload) * size, "in": len(plan.fetch) * size}
        if not self._synchronous:
            link["budget"] = self._budget(plan)
        step = {"query": plan.num_tokens, "recomputed": planned.recomputed_tokens, "saturation": self._saturation}
        self._count("device pages", {"free": free, "used": used, "paused": paused, "cached": cached}, start_us)
        self._count("host pages", {"free": host_total - host, "used": host}, start_us)
        self._count("link tokens", link, start_us)
        self._count("query tokens", step, start_us)
        for (number, move_name), args in self._moved.items():
            self._write(
                {"name": move_name, "ph": "i", "s": "t", "ts": start_us, "pid": _REQUESTS, "tid": number, "args": args}
            )
        self._moved.clear()

    def close(self) -> None:
        """End all spans now, and the file."""
        if self._file.closed:
            return
        now_us = self._us(self._now())
        for track in self._tracks.values():
            self._end_span(track, now_us)
        self._file.write("\n]}\n")
        self._file.close()

    # -- the parts -------------------------------------------------------------------------------------------------

    def _us(self, at_s: float) -> int:
        return round((at_s - self._began_s) * 1e6)

    def _budget(self, plan: StepPlan) -> int:
        """Tokens that the link moves behind the plan's compute."""
        seconds = IDLE_STEP_S
        if plan.chunks:
            context = sum([chunk.start + len(chunk.tokens) for chunk in plan.chunks])
            seconds = self._cost.step_s(plan.bucket, context)
        return self._cost.link_tokens(seconds)

    def _end_span(self, track: _Track, now_us: int) -> None:
        args = track.args | {"at_end": track.sequence.context.residency(track.sequence.max_computed)._asdict()}
        if track.done:
            args["moves"] = track.done
        self._write(
            {
                "name": track.state.value,
                "ph": "X",
                "ts": track.start_us,
                "dur": now_us - track.start_us,
                "pid": _REQUESTS,
                "tid": track.number,
                "args": args,
            }
        )

    def _count(self, name: str, values: dict[str, int], at_us: int) -> None:
        """Write a counter if it has changed; viewers hold its last value."""
        if self._counted.get(name) != values:
            self._counted[name] = values
            self._write({"name": name, "ph": "C", "ts": at_us, "pid": _ENGINE, "args": values})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(event, ensure_ascii=False, separators=(",", ":")))


def _why(event: Queued | Started | Paused) -> dict[str, Any]:
    """The first arguments of a span: why it began."""
    match event:
        case Paused():
            return {"interception": event.number, "tools": [call.name for call in event.sequence.calls]}
        case Queued():
            return {"because": event.because}
        case _:
            return {}


def _name(kind: str, name: str, process: int, track: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
