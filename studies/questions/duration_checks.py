"""Forecasts of how long calls still last, beside how long they did, from decision records (`sim.decision_records`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ALL = "all"
"""Name of the group with the interceptions of every tool."""


class ForecastCheck(NamedTuple):
    """A forecast of a call's remaining seconds at some age, and the actual ones."""

    remaining_s: float
    quantiles_s: Sequence[float]
    actual_s: float


def check_durations(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By tool and for `ALL`, a row for each age at which forecasts were due.

    Those made after the calls' end are left out. A row has `age_s`; `calls`; means of the `predicted_s` and the `actual_s`
    seconds still to come; `error_s`, the mean absolute difference; `pinball_s`, the mean quantile loss; `returned`, for
    each predicted quantile the share that had returned by then.
    """
    checks: dict[str, dict[float, list[ForecastCheck]]] = {ALL: {}}
    with path.open(encoding="utf-8") as file:
        run = json.loads(next(file))
        for line in map(json.loads, file):
            if line["type"] == "decision" or not line["returned"] or line["call_s"] is None:
                continue
            for forecast in line["forecasts"]:
                left_s = line["call_s"] - forecast["age_s"]
                if left_s < 0:
                    continue
                age_s = max(age for age in run["ages_s"] if age <= forecast["age_s"])
                for name in (ALL, "+".join(line["tools"]) or "none"):
                    check = ForecastCheck(forecast["remaining_s"], forecast["quantiles_s"], left_s)
                    checks.setdefault(name, {}).setdefault(age_s, []).append(check)
    return {
        name: [{"age_s": age_s, **_summary(of_age, run["quantiles"])} for age_s, of_age in sorted(by_age.items())]
        for name, by_age in checks.items()
    }


def _summary(checks: Sequence[ForecastCheck], quantiles: Sequence[float]) -> Mapping[str, Any]:
    return {
        "calls": len(checks),
        "predicted_s": fmean(check.remaining_s for check in checks),
        "actual_s": fmean(check.actual_s for check in checks),
        "error_s": fmean(abs(check.remaining_s - check.actual_s) for check in checks),
        "pinball_s": fmean(
            pinball(quantile, value_s, check.actual_s)
            for check in checks
            for quantile, value_s in zip(quantiles, check.quantiles_s, strict=True)
        ),
        "returned": {
            f"{quantile:g}": fmean(check.actual_s <= check.quantiles_s[index] for check in checks)
            for index, quantile in enumerate(quantiles)
        },
    }


def pinball(quantile: float, predicted: float, actual: float) -> float:
    """The loss that a quantile makes least: too low a forecast costs `quantile`, too high `1 - quantile` of the difference."""
    return max(quantile * (actual - predicted), (quantile - 1.0) * (actual - predicted))
