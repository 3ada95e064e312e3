"""A study's effort, answer and files: runs that are played or read again, tables, sentences, panels, Markdown and CSV."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from rich.console import Console

from jinfercept.errors import ConfigError
from jinfercept.sim.reports import TextTable, check_outputs, show, write_all
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.sweep import INTERRUPTED, SweepRun, sweep
from studies.plots import Panel, check_drawing, draw

if TYPE_CHECKING:
    from pandas import DataFrame


def write_csv(path: str | Path, reports: Sequence[Report]) -> None:
    """Write a row for each report. Nested keys are joined by points; missing values are empty; `slowness` is left out."""
    from pandas import json_normalize

    rows = [{name: value for name, value in report.items() if name != "slowness"} for report in reports]
    json_normalize(rows).convert_dtypes().to_csv(path, index=False)


def markdown_table(frame: "DataFrame", *, index: bool = False) -> str:
    """A table of texts, aligned to the right, without padding; `index`: the frame's index is the first column."""
    padded = frame.to_markdown(index=index, disable_numparse=True, stralign="right")
    return re.sub("-{3,}:", "---:", re.sub(" {2,}", " ", padded))


def titled_table(table: TextTable) -> str:
    """A table under its title."""
    from pandas import DataFrame

    return f"{table.title}\n\n{markdown_table(DataFrame(table.rows, columns=list(table.columns)))}"


def output_folder(out: str, names: Iterable[str]) -> Path:
    """The folder of `--out`, made if it does not exist, before the work that fills it.

    Args:
        out: its path.
        names: of the files that will be written into it, pictures among them.

    Raises:
        ConfigError: it cannot be made, a file cannot be written into it, or pictures need a package that is missing.
    """
    if not out:
        raise ConfigError("--out names no folder", got="an empty text", fix="name a folder")
    folder = Path(out)
    check_drawing(folder / "any.png")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out cannot be made", got=f"{folder} ({error})", fix="name a folder") from None
    check_outputs(("--out", folder / name) for name in names)
    return folder


@final
class FinishedRuns:
    """The reports of runs of sessions, by all that the runs are made of. A run that failed is not kept.

    Args:
        path: a file of JSON lines, which grows with every run that ends. The lines do not say which code made their reports:
            remove the file after a change of it.

    Raises:
        ConfigError: from the constructor: the file cannot be read, or has a line that is none of this class.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._digests = path, dict[int, str]()
        self._reports = dict[str, Report]()
        try:
            lines = path.read_text("utf-8").splitlines() if path.exists() else []
            for line in lines:
                entry = json.loads(line)
                self._reports[entry["run"]] = entry["report"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "remove the file, and the runs are played again"
            raise ConfigError("finished runs cannot be read", got=f"{path}: {error}", fix=fix) from None

    def report(self, run: SweepRun) -> Report | None:
        """The report of a run that has finished before; None if it has not."""
        return self._reports.get(self._key(run))

    def add(self, run: SweepRun, report: Report) -> None:
        """Keep the report of a run that has ended."""
        if "error" in report:
            return
        key = self._key(run)
        self._reports[key] = report
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": key, "report": report}) + "\n")

    def _key(self, run: SweepRun) -> str:
        load = run.load.arrivals
        assert isinstance(load, SessionLoad)
        sessions = self._digests.get(id(load.sessions))
        if sessions is None:
            sessions = self._digests[id(load.sessions)] = _digest(repr(load.sessions))
        return _digest(repr((run.simulation, run.load._replace(arrivals=replace(load, sessions=())), sessions)))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


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
