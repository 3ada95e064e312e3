"""Generated requests, each alone on the engine in virtual time, with calls in every mode and in the best order.

Every latency stands beside what `studies.calls.scripts` says; the difference is what the device computes to read the results.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from random import Random
from statistics import median
from typing import Any, NamedTuple

from jinfercept.sched.profile import Profile
from studies.calls.markup import CallArrival
from studies.calls.scripts import CallMix, CallScript, formula_s, priced
from studies.calls.simulation import CallSimulation

PUBLISHED = (1.6, 5.4)
"""AsyncLM's speed-up over synchronous calls, least and largest (arXiv 2412.07017, on BFCL)."""

LONGEST_FIRST = "longest first"
"""Asynchronous calls in the best order, beside those in the order of the script."""

FASTER = ("parallel", "async", LONGEST_FIRST)
"""Ways to call that are compared with synchronous calls."""

Row = dict[str, Any]
"""The numbers of a cell, as JSON values."""


class AloneCell(NamedTuple):
    """Requests of one mix on one machine.

    Attributes:
        mix: what they look like.
        profile: prices of the machine.
        num_requests: how many are drawn.
        seed: of the first; the next ones follow. Mixes that differ in prose, rounds or machine have the same calls.
    """

    mix: CallMix
    profile: Profile
    num_requests: int
    seed: int


class AloneLatency(NamedTuple):
    """Seconds of one request: on the engine, by the formula, and those in which the device read interrupts."""

    latency_s: float
    formula_s: float
    reading_s: float


def at_token_s(profile: Profile, token_s: float) -> Profile:
    """The machine, so much faster or slower that a request alone writes a token in `token_s` seconds."""
    factor = token_s / profile.step_s(1, 0)
    names = ("fixed_s", "flat_s", "per_query_s", "per_context_s", "per_pair_s", "collective_s")
    scaled = {name: factor * getattr(profile, name) for name in names}
    return replace(profile, **scaled, bucket_s=tuple(factor * seconds for seconds in profile.bucket_s))


def play_alone(script: CallScript, profile: Profile) -> AloneLatency:
    """Serve a request on an engine that serves nothing else, at pipeline depth 0."""
    room = 2 * (script.prompt + script.generated + 100 * sum(map(len, script.rounds)))
    machine = CallSimulation(
        profile,
        "preserve",
        duration_s=script.seconds + 100 * profile.step_s(script.prompt + script.generated, room),
        kv_tokens=room,
        host_tokens=0,
        max_model_len=room // 16 * 16,
        chunked_prefill=True,
    )
    report, written = machine.run([CallArrival(0.0, script)]), priced(script, profile)
    reading_s = report["step_s"]["priced"] - written(script.generated)
    return AloneLatency(report["latency_s"]["mean"], formula_s(script, written), reading_s)


def play_cell(cell: AloneCell) -> Row:
    """Serve the requests of a cell in every way.

    Returns:
        The mix; `token_ms`; `speedup`, the median over requests of the latency of synchronous calls over that of each other
        way; `work`, the median of `ΣE / ΣG`; `excess_steps`, in steps how far latencies are below the formula at worst
        (`least`) and above the formula and the reading of all interrupts (`most`); `reading_steps`, that reading at most.
    """
    token_s = cell.profile.step_s(1, 0)
    scripts = [cell.mix.draw(Random(cell.seed + number)) for number in range(cell.num_requests)]
    served = [_play_every_way(script, cell.profile) for script in scripts]
    runs = [run for ways in served for run in ways.values()]
    over_s = [(run.latency_s - run.formula_s, run.reading_s) for run in runs]
    return {
        "tool": cell.mix.tool,
        "token_ms": round(1e3 * token_s, 6),
        "rounds": cell.mix.rounds,
        "calls": cell.mix.calls,
        "prose": cell.mix.prose,
        "requests": cell.num_requests,
        "speedup": {way: median(ways["sync"].latency_s / ways[way].latency_s for ways in served) for way in FASTER},
        "work": median(script.seconds / (token_s * script.generated) for script in scripts),
        "excess_steps": {
            "least": min(0.0, *(excess_s for excess_s, _ in over_s)) / token_s,
            "most": max(0.0, *(excess_s - reading_s for excess_s, reading_s in over_s)) / token_s,
        },
        "reading_steps": max(reading_s for _, reading_s in over_s) / token_s,
        "mix": asdict(cell.mix),
    }


def _play_every_way(script: CallScript, profile: Profile) -> dict[str, AloneLatency]:
    ways = {mode: script._replace(calls=mode) for mode in ("sync", "parallel", "async")}
    return {
        way: play_alone(way_script, profile)
        for way, way_script in (ways | {LONGEST_FIRST: script.longest_first}).items()
    }


def play_cells(cells: Sequence[AloneCell], jobs: int, done: Callable[[], None]) -> list[Row]:
    """The rows of all cells, in their order; `done` is called after each. Ctrl-C ends the processes."""
    if jobs == 1 or len(cells) == 1:
        return [_then(play_cell(cell), done) for cell in cells]
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        return [_then(row, done) for row in pool.imap(play_cell, cells)]


def _then(row: Row, done: Callable[[], None]) -> Row:
    done()
    return row


def excess(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Over all rows: least and largest difference to the formula in steps, reading left out, and the steps of reading."""
    return (
        min(row["excess_steps"]["least"] for row in rows),
        max(row["excess_steps"]["most"] for row in rows),
        max(row["reading_steps"] for row in rows),
    )
