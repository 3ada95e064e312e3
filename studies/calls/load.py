"""Many requests at once in the simulator, which call for the same work synchronously, in parallel and asynchronously."""

from collections.abc import Sequence
from random import Random
from typing import get_args

from jinfercept.calls import CallMode
from jinfercept.sim.arrivals import arrival_times
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import SimulatedLoad
from studies.calls.markup import CallArrival
from studies.calls.scripts import DURATIONS, CallMix, CallScript

CALL_MODES: tuple[CallMode, ...] = get_args(CallMode)


def draw_loaded(rng: Random) -> CallScript:
    """A request of the load: 1 to 8 calls in one or two rounds, short or heavy-tailed, up to half of the tokens prose."""
    calls = rng.choice((1, 2, 4, 8))
    mix = CallMix(
        calls,
        prose=rng.choice((0.0, 0.25, 0.5)),
        rounds=min(calls, rng.choice((1, 1, 2))),
        tool=rng.choice(tuple(DURATIONS)),
        prompt=rng.randint(200, 1200),
        answer=rng.randint(20, 120),
    )
    return mix.draw(rng)


def call_loads(rates: Sequence[float], duration_s: float, seed: int) -> list[SimulatedLoad[Sequence[CallArrival]]]:
    """The same requests at the same times in each `CallMode`, for each rate. The workload's name is the mode.

    Raises:
        ConfigError: a rate or `duration_s` is out of range.
    """
    loads: list[SimulatedLoad[Sequence[CallArrival]]] = []
    for rate in rates:
        rng = Random(seed)
        drawn = [CallArrival(at_s, draw_loaded(rng)) for at_s in arrival_times(rate, duration_s, rng)]
        for mode in CALL_MODES:
            called = [arrival._replace(script=arrival.script._replace(calls=mode)) for arrival in drawn]
            loads.append(SimulatedLoad(mode, rate, seed, called))
    return loads


def memory_token_s(report: Report) -> dict[str, float]:
    """Token·seconds of device memory per finished request: of requests that run, and of paused ones."""
    finished = report["requests"] - report["unfinished"]
    return {part: value / finished if finished else 0.0 for part, value in report["memory_token_s"].items()}
