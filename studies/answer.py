"""What a study is asked with and answers: the effort that it may take, and tables, sentences and panels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from jinfercept.errors import ConfigError
from jinfercept.sim.reports import write_all
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import INTERRUPTED, SweepRun, sweep
from jinfercept.sim.tables import TextTable, show
from studies.csv_rows import write_csv
from studies.finished_runs import FinishedRuns
from studies.markdown_table import titled_table
from studies.plots import Panel, draw


class StudyEffort(NamedTuple):
    """How much a study may do.

    Attributes:
        quick: a few small cells, in seconds; else all of them, in minutes.
        jobs: processes at a time.
        seed: of the requests.
        console: where progress is shown.
        policies: places or names of policies to serve beside those that a question names, where it compares policies.
        finished: reports of earlier runs of the study, which are not played again; None: there are none.
    """

    quick: bool
    jobs: int
    seed: int
    console: Console
    policies: Sequence[str] = ()
    finished: FinishedRuns | None = None

    def play(self, runs: Sequence[SweepRun]) -> list[Report]:
        """Simulate; returns the reports in the order of `runs`.

        Raises:
            ConfigError: a run failed: a table with holes answers nothing.
            KeyboardInterrupt: Ctrl-C ended some.
        """
        if self.finished is None:
            reports = sweep(runs, self.jobs, self.console)
        else:
            earlier = [self.finished.report(run) for run in runs]
            left = [run for run, report in zip(runs, earlier, strict=True) if report is None]
            played = iter(sweep(left, self.jobs, self.console, self.finished.add))
            reports = [report or next(played) for report in earlier]
        errors = [(run, report["error"]) for run, report in zip(runs, reports, strict=True) if "error" in report]
        if any(error == INTERRUPTED for _, error in errors):
            raise KeyboardInterrupt
        if errors:
            run, error = errors[0]
            raise ConfigError(f"{len(errors)} runs of the study failed", got=f"{run}: {error}", fix="see the error")
        return reports


@dataclass(frozen=True)
class StudyAnswer:
    """What a study found.

    Attributes:
        title: the question, as a heading.
        tables: in the order in which they are read.
        findings: sentences that the numbers of this run support, each written from them.
        panels: of the picture, by row; empty: no picture.
        rows: all numbers, for a CSV file.
    """

    title: str
    tables: Sequence[TextTable]
    findings: Sequence[str]
    panels: Sequence[Sequence[Panel]] = ()
    rows: Sequence[Report] = field(default=(), repr=False)

    def show(self) -> None:
        """Print tables and findings."""
        print(f"\n{self.title}\n")
        for table in self.tables:
            show(table.shown())
            print()
        for finding in self.findings:
            print(f"* {finding}")

    def markdown(self, picture: str | None) -> str:
        """The answer as a page; `picture` is the file of its panels, None for a page without."""
        parts = [f"## {self.title}", *([f"![{self.title}]({picture})"] if picture else [])]
        parts += ["\n".join(f"* {finding}" for finding in self.findings)] if self.findings else []
        return "\n\n".join([*parts, *map(titled_table, self.tables)]) + "\n"

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write `name` with .md, .png and .csv behind it into a folder; returns the files.

        Raises:
            ConfigError: one could not be written, or pictures need a package that is missing.
        """
        page, picture, rows = (folder / f"{name}.{suffix}" for suffix in ("md", "png", "csv"))
        writers: dict[str, Callable[[], object]] = {}
        writers[str(page)] = lambda: page.write_text(self.markdown(picture.name if self.panels else None), "utf-8")
        if self.panels:
            writers[str(picture)] = lambda: draw(picture, self.panels)
        if self.rows:
            writers[str(rows)] = lambda: write_csv(rows, self.rows)
        write_all(writers)
        return [Path(path) for path in writers]
