"""`python -m studies decisions`: the tables of decision records. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jinfercept.cli.options import Files, Maybe
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_outputs, write_files, write_json
from jinfercept.sim.tables import number_text, plain_table, show
from studies.decisions.summary import ALL, DecisionFile, duration_summary, load_records, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Decisions:
    """The command."""

    files: Files
    """what --decisions has written; a file that is not there: those that several runs have written in its place"""
    json: Maybe[str] = None
    """write the tables to this file"""
    plot: Maybe[str] = None
    """draw calibration and waste into this file"""

    def run(self) -> int:
        """Print tables; returns 0. Raises `ConfigError` for files that are not there or cannot be written."""
        if not self.files:
            raise ConfigError("no file of decisions was given", got="no FILE", fix="name what --decisions has written")
        json_path, plot_path = self.json, self.plot
        check_outputs((("--json", json_path), ("--plot", plot_path)))
        if plot_path is not None:
            check_drawing(plot_path)
        files = [file for path in self.files for file in files_of(path)]
        records = [load_records(path) for path in files]
        summaries = [summary(record) for record in records]
        for path, run_summary in zip(files, summaries, strict=True):
            values = {key: value for key, value in run_summary["run"].items() if isinstance(value, str | int | float)}
            shown = ", ".join(f"{key} {value}" for key, value in values.items() if key not in ("type", "version"))
            Console().print(f"\n[bold]{path}[/bold]: {shown}; {run_summary['unreturned']} interceptions did not return")
            for table in tables(run_summary):
                show(table)
        write_files(
            {
                json_path: lambda path: write_json(path, summaries),
                plot_path: lambda path: calibration_plot(records, path),
            }
        )
        return 0


def files_of(path: str) -> list[str]:
    """The file; if there is none of this name, the files that several runs have written instead (`recording.run_path`)."""
    place = Path(path)
    several = () if place.exists() else place.parent.glob(f"{escape(place.stem)}-*{escape(place.suffix)}")
    return sorted(map(str, several)) or [path]


def tables(run_summary: Mapping[str, Any]) -> list[Table]:
    """Tables of one run's actions, waste and durations, from its summary."""
    actions = _table("what was done", "action", "why")
    for row in run_summary["decisions"]:
        _add(actions, {"action": row["action"], "why": row["why"]}, {k: v for k, v in row.items() if type(v) is int})
    waste = _table("waste of an interception, token·seconds", "tool")
    for tool, row in run_summary["waste"].items():
        spread = {
            f"{name} {part}": row[name][part]
            for name, parts in (("predicted", ("p50", "mean")), ("actual", ("p50", "mean")), ("ratio", _PARTS))
            for part in parts
        }
        sums = {"Σ/Σ": row["of_all"], "unpredicted": row["unpredicted"]} | row["parts"]
        _add(waste, {"tool": tool}, {"calls": row["interceptions"]} | spread | sums)
    durations = _table("seconds still to come of a call", "tool")
    for tool, rows in run_summary["durations"].items():
        for row in rows:
            numbers = {key: value for key, value in row.items() if key != "returned"}
            _add(durations, {"tool": tool}, numbers | {f"by q{q}": share for q, share in row["returned"].items()})
    return [actions, waste, durations]


_PARTS = ("p10", "p50", "p90")


def _table(title: str, *names: str) -> Table:
    return plain_table(names, left=names, title=title)


def _add(table: Table, names: Mapping[str, str], numbers: Mapping[str, float | None]) -> None:
    """A row; the first one names the columns."""
    if not table.row_count:
        for name in numbers:
            table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    table.add_row(*names.values(), *("-" if value is None else number_text(value) for value in numbers.values()))


def calibration_plot(records: Sequence[DecisionFile], path: str | Path) -> None:
    """A row for each run: durations by predicted quantile and age, and waste of every interception, predicted and actual.

    Raises `ConfigError` as `check_drawing` does.
    """
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5 * len(records)), layout="constrained")
    for (durations, waste), record in zip(figure.subplots(len(records), 2, squeeze=False), records, strict=True):
        title = " ".join(str(record.run[name]) for name in ("policy", "estimator") if name in record.run)
        _draw_durations(durations, record)
        durations.set_title(f"{title}: durations")
        _draw_waste(waste, record)
        waste.set_title(f"{title}: waste of an interception")
        for axes in (durations, waste):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_durations(axes: "Axes", records: DecisionFile) -> None:
    quantiles = records.run["quantiles"]
    axes.plot((0, 1), (0, 1), color="black", linewidth=0.6, linestyle=":", label="perfect")
    for age_s, looks in sorted(records.checks[ALL].items()):
        returned = duration_summary(looks, quantiles)
        axes.plot(
            quantiles, returned["returned"].values(), marker=".", label=f"at {age_s:g} s ({returned['calls']:,} calls)"
        )
    axes.set(xlabel="predicted quantile of the time still to come", ylabel="share that had returned by then")


def _draw_waste(axes: "Axes", records: DecisionFile) -> None:
    least = 1.0  # token·second; lower values are drawn here
    most = least
    for tool, outcomes in sorted(records.outcomes.items()):
        if tool == ALL:
            continue
        predicted = [max(least, outcome["predicted_token_s"]) for outcome in outcomes]
        actual = [max(least, outcome["actual_token_s"]) for outcome in outcomes]
        most = max(most, *predicted, *actual)
        axes.scatter(predicted, actual, s=4, alpha=0.4, label=tool)
    axes.plot((least, most), (least, most), color="black", linewidth=0.6, linestyle=":", label="as predicted")
    axes.set(xlabel="predicted, token·seconds (1 stands for less)", ylabel="actual", xscale="log", yscale="log")
