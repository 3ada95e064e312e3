"""Runs many simulations in a few processes, with a progress display. Imports no JAX.

A run that fails, or whose process dies, becomes a report with an `error`; the others continue. Ctrl-C ends the running ones;
the reports of finished ones remain.
"""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jinfercept.sim.arrivals import Arrival, RequestArrival
from jinfercept.sim.run_stats import Report
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.simulation import Simulation

INTERRUPTED = "interrupted"
"""The `error` of runs that Ctrl-C has ended."""


class SimulatedLoad[A](NamedTuple):
    """The arrivals of a run.

    Attributes:
        workload: its name, for the report.
        rate: requests or sessions per second; 0 for a number of live sessions.
        arrivals: the requests, in order; or sessions.
    """

    workload: str
    rate: float
    seed: int
    arrivals: A

    @property
    def text(self) -> str:
        """The rate, or the number of live sessions: no two have the same text."""
        live = self.arrivals.live if isinstance(self.arrivals, SessionLoad) else 0
        return f"{live} live" if live else rate_text(self.rate)


@dataclass(frozen=True)
class SweepRun:
    """One simulation under one load.

    Attributes:
        decisions: file of its decision records.
    """

    simulation: Simulation
    load: SimulatedLoad[Sequence[Arrival | RequestArrival] | SessionLoad]
    decisions: str | None = None

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

    @property
    def file_name(self) -> str:
        """The part of its files' names that distinguishes the run in a sweep."""
        order = "" if self.simulation.order == "fcfs" else f"-{self.simulation.order_name}"
        return f"{self.simulation.policy_name}{order}-{self.load.text}-{self.load.seed}"

    def play(self, progress: Callable[[float], None]) -> Report:
        """Simulate; an exception becomes the report's `error`.

        Args:
            progress: called with the simulated seconds, a few times a second.
        """
        try:
            return self.labels | self.simulation.run(
                self.load.arrivals, lambda now, end: progress(float(now)), self.decisions
            )
        except Exception as error:
            return self.failed(f"{type(error).__name__}: {error}")

    def failed(self, error: str) -> Report:
        """The report of a run without results."""
        return self.labels | {"error": error}


def rate_text(rate: float) -> str:
    """All digits of a rate: no two rates have the same text."""
    return repr(rate).removesuffix(".0")


def sweep(
    runs: Sequence[SweepRun],
    jobs: int,
    console: Console,
    finished: Callable[[SweepRun, Report], None] = lambda run, report: None,
) -> list[Report]:
    """Play all runs, those with the most requests first; returns their reports in the order of `runs`.

    Args:
        runs: simulations and their loads.
        jobs: processes at a time, at least 1.
        console: where the progress is shown: bars on a terminal, elsewhere a line for each run that ends.
        finished: called with every run that ends, and its report.
    """
    reports: dict[int, Report] = {}
    waiting = sorted(range(len(runs)), key=lambda number: len(runs[number].load.arrivals))
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    with _Display(runs, console) as display:
        try:
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    worker = idle.pop() if idle else _Worker()
                    busy[worker.pipe] = worker
                    display.started(waiting[-1])
                    worker.give(waiting[-1], runs[waiting.pop()])
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    worker = busy[pipe]
                    message = worker.receive(runs[worker.number])
                    if not isinstance(message, dict):
                        display.moved(worker.number, message)
                        continue
                    reports[worker.number] = message
                    display.ended(worker.number, message)
                    finished(runs[worker.number], message)
                    del busy[pipe]
                    if worker.process.exitcode is None:
                        idle.append(worker)
        except KeyboardInterrupt:
            pass
        finally:
            with _no_interrupt():
                for worker in (*idle, *busy.values()):
                    worker.end()
    return [reports.get(number) or run.failed(INTERRUPTED) for number, run in enumerate(runs)]


@final
class _Worker:
    """A process that plays one run after another: it sends simulated seconds, then the report.

    Attributes:
        pipe: carries runs to it, and simulated seconds and reports back.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # whose start would let Ctrl-C through to the process
        self.pipe, child_end = context.Pipe()
        self.number = -1
        self.process = context.Process(target=_work, args=(child_end,), daemon=True)
        with _no_interrupt():
            self.process.start()
        child_end.close()

    def give(self, number: int, run: SweepRun) -> None:
        self.number = number
        with contextlib.suppress(OSError):  # it is dead: `receive` will say so
            self.pipe.send(run)

    def receive(self, run: SweepRun) -> float | Report:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return run.failed(f"its process ended with status {self.process.exitcode}")

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection) -> None:
    """The main function of a worker: plays runs until the process is ended or the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            run: SweepRun = pipe.recv()
            pipe.send(run.play(pipe.send))


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Delays Ctrl-C until the block has ended; processes started in it ignore Ctrl-C, and this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@final
class _Display:
    """Progress bars: finished runs, and the simulated seconds of running ones."""

    def __init__(self, runs: Sequence[SweepRun], console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        columns += (TextColumn("{task.fields[unit]}"), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._progress.add_task("all runs", total=len(runs), unit="done")
        self._runs, self._num_done, self._began_s = runs, 0, time.monotonic()
        self._left = sum(len(run.load.arrivals) for run in runs)
        self._requests = 0
        self._tasks: dict[int, TaskID] = {}

    def started(self, index: int) -> None:
        run = self._runs[index]
        total = round(run.simulation.most_s)
        self._tasks[index] = self._progress.add_task(str(run), total=total, unit="simulated s")

    def moved(self, index: int, now: float) -> None:
        self._progress.update(self._tasks[index], completed=round(now))

    def ended(self, index: int, report: Report) -> None:
        self._num_done += 1
        time_left = self._time_left(len(self._runs[index].load.arrivals))
        self._progress.remove_task(self._tasks.pop(index))
        self._progress.update(self._all, advance=1, unit=f"done, {time_left}")
        how = report.get("error") or f"{report['sim_wall_s']:.1f} s"
        if not self._console.is_terminal:
            self._console.print(
                f"{self._num_done} of {len(self._runs)}: {self._runs[index]}: {how}, {time_left}", soft_wrap=True
            )

    def _time_left(self, num_requests: int) -> str:
        """When all runs will be done, if requests take as long as those so far. Called once for each run that ends."""
        self._requests, self._left = self._requests + num_requests, self._left - num_requests
        left_s = (time.monotonic() - self._began_s) * self._left / max(1, self._requests)
        return f"about {left_s:.0f} s left" if left_s < 90 else f"about {left_s / 60:.0f} min left"

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
