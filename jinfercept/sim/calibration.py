"""Calibration plots of decision records: predicted against actual durations and waste."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinfercept.sim.decision_summary import ALL, DecisionFile, duration_summary
from jinfercept.sim.plots import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
