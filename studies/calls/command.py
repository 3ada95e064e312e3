"""`python -m studies calls`: what asynchronous calls are worth, beside synchronous and parallel ones.

One request alone in virtual time, beside AsyncLM's formulas; many at once, under several policies; and with `--real` a few
requests on a real model with tools that sleep. All run the real engine and scheduler. Imports no JAX without `--real`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import POLICY_NAMES, check_policies
from jinfercept.cli.simulation_table import exit_status
from jinfercept.errors import ConfigError
from jinfercept.sched.estimator import ESTIMATORS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_outputs, write_all, write_json
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SweepRun, sweep
from jinfercept.sim.tables import TextTable, check_least, listed, numbers, show
from studies.calls.alone import AloneCell, Row, at_token_s, play_cells
from studies.calls.load import call_loads
from studies.calls.scripts import DURATIONS, CallMix
from studies.calls.tables import alone_table, formula_text, load_table, panels
from studies.csv_rows import write_csv
from studies.markdown_table import titled_table
from studies.plots import draw

POLICIES = ("discard", "swap", "preserve", "min_waste", "copy_ahead")
CALLS, PROSE, ROUNDS = (1, 2, 4, 8, 16), (0.0, 0.25, 0.5, 0.75), (1, 4)
QUICK_CALLS, QUICK_PROSE, QUICK_ROUNDS = (1, 4, 16), (0.0, 0.5), (1,)
LOAD_MODEL_LEN = 2560


@dataclass(frozen=True, kw_only=True)
class StudyCalls:
    """The command."""

    quick: Switch = False
    """a small part of everything, in seconds"""
    real: Switch = False
    """instead: a few requests on a model, in real time, with Python tools that sleep"""
    model: Maybe[str] = None
    """with --real: smollm2-135m, a Hugging Face directory or hub id, or a .gguf file (default: a tiny one, random weights)"""
    profile: str = "paper-gptj-6b-a100"
    """a named profile, or a JSON file"""
    token_ms: Several = ()
    """milliseconds in which a request alone writes a token: the profile's prices are scaled (default: 1,3,10)"""
    requests: int = 8
    """requests of each mix that are served alone"""
    policy: Annotated[Several, conf.arg(help=f"{POLICY_NAMES} (default: {', '.join(POLICIES)})")] = ()
    rate: Several = ()
    """requests per second of the load (default: 2,4,8,12)"""
    duration: Maybe[float] = None
    """seconds of arrivals of the load (default: 40; with --quick 4)"""
    estimator: Annotated[str, conf.arg(help=f"of durations: {', '.join(ESTIMATORS)}")] = "history"
    kv_tokens: int = 53_000
    """device pool under load"""
    host_tokens: int = 300_000
    """host pool under load"""
    seed: int = 0
    """of the requests"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    json: Maybe[str] = None
    """write all numbers to this file"""
    csv: Maybe[str] = None
    """write a row for each mix and each run under load to this file"""
    markdown: Maybe[str] = None
    """write the tables to this file"""
    plot: Maybe[str] = None
    """draw speed-ups, latency and memory into this file"""

    def run(self) -> int:
        """Run the study, and print tables.

        Returns:
            The exit status: 0, 1 if a run failed, 130 if Ctrl-C ended some.

        Raises:
            ConfigError: the options make no sense.
        """
        self._check()
        console = Console(stderr=True)
        if self.real:
            return self._run_real()
        cells, runs = self._cells(), self._runs()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests alone", total=len(cells))
            rows = play_cells(cells, self.jobs, lambda: progress.advance(task))
        reports = sweep(runs, self.jobs, console)
        tables = [alone_table(rows), load_table(reports)]
        show(tables[0].shown())
        print(formula_text(rows))
        show(tables[1].shown())
        self._write(tables, rows, reports, formula_text(rows))
        return exit_status(reports)

    def _check(self) -> None:
        """Raise `ConfigError` for options that make no sense, and for files that cannot be written."""
        check_least("--requests", self.requests, 1)
        check_least("--jobs", self.jobs, 1)
        check_least("--host-tokens", self.host_tokens, 0)
        check_least("--kv-tokens", self.kv_tokens, LOAD_MODEL_LEN)
        if self.estimator not in ESTIMATORS:
            raise ConfigError("no such estimator", got=self.estimator, fix=f"one of {', '.join(ESTIMATORS)}")
        check_policies(self._policies)
        if self.real and self.plot:
            raise ConfigError("--real has a table alone", got="--plot", fix="leave it out")
        if self.model is not None and not self.real:
            raise ConfigError(
                "--model is for --real", got=self.model, fix="give --real too; the simulation takes --profile"
            )
        files = (("--json", self.json), ("--csv", self.csv), ("--markdown", self.markdown), ("--plot", self.plot))
        check_outputs(files)
        if self.plot is not None:
            check_drawing(self.plot)

    @property
    def _policies(self) -> list[str]:
        return listed(self.policy or POLICIES)

    def _cells(self) -> list[AloneCell]:
        """Every combination of durations, speed, rounds, calls and prose."""
        speeds = numbers("--token-ms", self.token_ms or ("3" if self.quick else "1,3,10",), float)
        check_least("--token-ms", speeds[0], 1e-3)
        machine = load_profile(self.profile)
        some = (QUICK_ROUNDS, QUICK_CALLS, QUICK_PROSE) if self.quick else (ROUNDS, CALLS, PROSE)
        mixes = [
            CallMix(calls, share, rounds, tool)
            for tool in DURATIONS
            for rounds in some[0]
            for calls in some[1]
            if calls >= rounds
            for share in some[2]
        ]
        num = 1 if self.quick else self.requests
        return [AloneCell(mix, at_token_s(machine, ms / 1e3), num, self.seed) for ms in speeds for mix in mixes]

    def _runs(self) -> list[SweepRun]:
        """Every combination of rate, way to call and policy."""
        duration_s = (4.0 if self.quick else 40.0) if self.duration is None else self.duration
        rates = numbers("--rate", self.rate or ("8" if self.quick else "2,4,8,12",), float)
        machine, runs = load_profile(self.profile), list[SweepRun]()
        for load in call_loads(rates, duration_s, self.seed):
            for policy in self._policies:
                simulation = Simulation(
                    machine,
                    policy,
                    self.estimator,
                    duration_s,
                    kv_tokens=self.kv_tokens,
                    host_tokens=self.host_tokens,
                    max_model_len=LOAD_MODEL_LEN,
                )
                runs.append(SweepRun(simulation, load))
        return runs

    def _run_real(self) -> int:
        from studies.calls.real import run_real

        table, rows = run_real(self.model, self.seed, quick=self.quick)
        self._write([table], rows, [], "")
        return 0

    def _write(self, tables: Sequence[TextTable], rows: Sequence[Row], reports: Sequence[Report], note: str) -> None:
        """Write the files that were asked for."""
        writers: dict[str, Callable[[], object]] = {}
        if (json_path := self.json) is not None:
            writers[json_path] = lambda: write_json(json_path, {"requests": rows, "loads": reports})
        if (csv_path := self.csv) is not None:
            writers[csv_path] = lambda: write_csv(csv_path, [*rows, *reports])
        if (markdown_path := self.markdown) is not None:
            text = "\n\n".join([*map(titled_table, tables), note])
            writers[markdown_path] = lambda: Path(markdown_path).write_text(text.strip() + "\n", encoding="utf-8")
        if (plot_path := self.plot) is not None:
            writers[plot_path] = lambda: draw(plot_path, panels(rows, reports))
        write_all(writers)
