"""Runs many simulations, in several processes if there are several jobs. Imports no JAX.

A run that fails becomes a report with an `error`, and the others continue. Ctrl-C ends the running ones; the reports of
finished ones remain.
"""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rich.console import Console

from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import RunWatch, Simulation
from jinfercept.sim.workload import Arrival

INTERRUPTED = "interrupted"
"""The `error` of runs that Ctrl-C has ended."""


class SimulatedLoad[A](NamedTuple):
    """The arrivals of a run: requests in order, or sessions."""

    workload: str
    rate: float  # requests or sessions per second; 0 for a number of live sessions
    seed: int
    arrivals: A

    @property
    def text(self) -> str:
        """The rate, or the number of live sessions: no two have the same text."""
        live = self.arrivals.live if isinstance(self.arrivals, SessionLoad) else 0
        return f"{live} live" if live else rate_text(self.rate)


@dataclass(frozen=True)
class SweepRun:
    simulation: Simulation
    load: SimulatedLoad[Sequence[Arrival] | SessionLoad]

    @property
    def labels(self) -> Report:
        """The names and numbers that distinguish the run in a table."""
        simulation, load = self.simulation, self.load
        return {
            "profile": simulation.profile.name,
            "workload": load.workload,
            "policy": simulation.policy_name,
            "estimator": simulation.estimator_name,
            "order": simulation.order_name,
            "rate": load.rate,
            "load": load.text,
            "seed": load.seed,
            "duration_s": simulation.duration_s,
            "kv_tokens": simulation.kv_tokens,
        }

    def __str__(self) -> str:
        simulation, load = self.simulation, self.load
        order = "" if simulation.order == "fcfs" else f" {simulation.order_name}"
        how = f"{load.rate:.5g}/s" if load.rate else load.text
        return f"{simulation.policy_name}{order} {simulation.estimator_name} {load.workload} {how} seed {load.seed}"

    def play(self, watch: RunWatch | None = None) -> Report:
        """Simulate; an exception becomes the report's `error`."""
        try:
            return self.labels | self.simulation.run(self.load.arrivals, watch)
        except Exception as error:
            return self.failed(f"{type(error).__name__}: {error}")

    def failed(self, error: str) -> Report:
        return self.labels | {"error": error}


def rate_text(rate: float) -> str:
    """All digits of a rate: no two rates have the same text."""
    return repr(rate).removesuffix(".0")


def sweep(
    runs: Sequence[SweepRun],
    jobs: int,
    console: Console,
    finished: Callable[[SweepRun, Report], None] = lambda run, report: None,
    watch: RunWatch | None = None,
) -> list[Report]:
    """Play all runs, those with the most requests first, and return their reports in the order of `runs`.

    The console shows how many runs have ended, and a line for each. `watch` is called for a run in this process: with one job,
    or one run.
    """
    reports: dict[int, Report] = {}
    order = sorted(range(len(runs)), key=lambda number: -len(runs[number].load.arrivals))
    in_processes = min(jobs, len(runs)) > 1
    played = _played(runs, order, jobs) if in_processes else ((number, runs[number].play(watch)) for number in order)
    try:
        with closing(played), console.status(f"simulating {len(runs)} of {len(runs)} runs") as status:
            for number, report in played:
                reports[number] = report
                status.update(f"simulating {len(runs) - len(reports)} of {len(runs)} runs")
                how = report.get("error") or f"{report['sim_wall_s']:.1f} s"
                console.print(f"{len(reports)} of {len(runs)}: {runs[number]}: {how}", soft_wrap=True)
                finished(runs[number], report)
    except KeyboardInterrupt:
        pass
    return [reports.get(number) or run.failed(INTERRUPTED) for number, run in enumerate(runs)]


def _played(runs: Sequence[SweepRun], order: Sequence[int], jobs: int) -> Generator[tuple[int, Report]]:
    # the processes ignore Ctrl-C: this one ends them
    executor = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    )
    try:
        futures: dict[Future[Report], int] = {executor.submit(runs[number].play): number for number in order}
        for future in as_completed(futures):
            error = future.exception()
            number = futures[future]
            yield number, future.result() if error is None else runs[number].failed(f"its process ended: {error}")
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
