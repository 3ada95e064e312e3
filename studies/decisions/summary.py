"""Summaries of decision records: predicted against actual waste and durations, and how often each action was taken.

Reads the files of `sim.decision_records`. Distributions are over returned interceptions, in token·seconds and seconds.
"""

import json
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.meter.pause_account import PauseCost
from jinfercept.sim.decision_records import VERSION

ALL = "all"
"""Name of the group with the interceptions of every tool."""


class ForecastCheck(NamedTuple):
    """A forecast of a call's remaining seconds at some age, and the actual ones."""

    remaining_s: float
    quantiles_s: Sequence[float]
    actual_s: float


class DecisionFile(NamedTuple):
    """A file of decision records.

    Attributes:
        run: its first line.
        actions: sums over decisions, by action and reason.
        outcomes: returned interceptions, by tool and for `ALL`.
        checks: forecasts against actual seconds, by tool and for `ALL`, by the age at which they were due.
        unreturned: number of interceptions that ended without a return.
    """

    run: Mapping[str, Any]
    actions: Mapping[tuple[str, str], Mapping[str, int]]
    outcomes: Mapping[str, Sequence[Mapping[str, Any]]]
    checks: Mapping[str, Mapping[float, Sequence[ForecastCheck]]]
    unreturned: int


def load_records(path: str | Path) -> DecisionFile:
    """Read a file of records; a last line that was cut off is left out.

    Raises:
        ConfigError: no such file, not of this kind and version, or a line that is not as it was written.
    """
    lines = _lines(path)
    number, run = next(lines, (0, None))
    if not isinstance(run, dict) or run.get("type") != "run" or run.get("version") != VERSION:
        got = "another kind of first line" if number else "no line"
        raise ConfigError(f"{path} does not hold decisions of version {VERSION}", got=got, fix=_FIX)
    actions: dict[tuple[str, str], dict[str, int]] = {}
    outcomes: dict[str, list[dict[str, Any]]] = {ALL: []}
    checks: dict[str, dict[float, list[ForecastCheck]]] = {ALL: {}}
    unreturned = 0
    try:
        run |= {"quantiles": _numbers(run["quantiles"]), "ages_s": _numbers(run["ages_s"])}
    except _MISTAKES as error:
        raise _no_record(path, number, error) from None
    for number, line in lines:
        try:
            if line["type"] == "decision":
                sums = actions.setdefault((line["action"], line["why"]), dict.fromkeys(("decisions", *_SUMS), 0))
                sums["decisions"] += 1
                for name, value in zip(_SUMS, _numbers(line.get(name, 0) for name in _SUMS), strict=True):
                    sums[name] += value
            elif line["returned"]:
                _compare(line, run, outcomes, checks)
            else:
                unreturned += 1
        except _MISTAKES as error:
            raise _no_record(path, number, error) from None
    return DecisionFile(run, actions, outcomes, checks, unreturned)


_SUMS = ("tokens", "copied_tokens", "freed_tokens", "lost_tokens")
_FIX = "write it with `jinfercept simulate --decisions FILE`"
_MISTAKES = (KeyError, TypeError, ValueError, AttributeError)  # raised by lines that do not have the written form


def _no_record(path: str | Path, number: int, error: Exception) -> ConfigError:
    got = f"no {error}" if isinstance(error, KeyError) else error
    return ConfigError(f"{path}, line {number}: not a record as it was written", got=got, fix=_FIX)


def _lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Every line with its number, from 1."""
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, json.loads(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the decisions cannot be read", got=f"{path} ({error})", fix="name a .jsonl file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not JSON", got=error, fix=_FIX) from None


def _compare(
    line: dict[str, Any],
    run: Mapping[str, Any],
    outcomes: dict[str, list[dict[str, Any]]],
    checks: dict[str, dict[float, list[ForecastCheck]]],
) -> None:
    """Add an interception that returned, and its forecasts, to those of its tools and of all."""
    _numbers((line["predicted_token_s"], line["actual_token_s"], *(line["actual"][part] for part in PauseCost._fields)))
    forecasts = list(_checks(line, run))
    for name in (ALL, "+".join(line["tools"]) or "none"):
        outcomes.setdefault(name, []).append(line)
        by_age = checks.setdefault(name, {})
        for age_s, check in forecasts:
            by_age.setdefault(age_s, []).append(check)


def _numbers(values: Iterable[Any]) -> list[Any]:
    """The same values. Raises `TypeError` if one is no number, and `ValueError` if it is none to calculate with."""
    numbers = list(values)
    for value in numbers:
        if not isinstance(value, int | float):
            raise TypeError(f"{reprlib.repr(value)} where a number belongs")
        if not abs(value) <= sys.float_info.max:
            raise ValueError(f"{reprlib.repr(value)} where a finite number belongs")
    return numbers


def _checks(line: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[tuple[float, ForecastCheck]]:
    """The forecasts of an interception, by the last age that was due; those made after the calls' end are left out."""
    for forecast in line["forecasts"]:
        left_s = -1.0 if line["call_s"] is None else line["call_s"] - forecast["age_s"]
        if left_s >= 0:
            quantiles_s = _numbers(forecast["quantiles_s"])
            if len(quantiles_s) != len(run["quantiles"]):
                raise ValueError(f"{len(quantiles_s)} quantiles, and {len(run['quantiles'])} in the first line")
            [remaining_s] = _numbers([forecast["remaining_s"]])
            yield (
                max(age for age in run["ages_s"] if age <= forecast["age_s"]),
                ForecastCheck(remaining_s, quantiles_s, left_s),
            )


# -- in numbers --------------------------------------------------------------------------------------------------------


def summary(records: DecisionFile) -> dict[str, Any]:
    """Sums, waste and durations of a file, as JSON values."""
    return {
        "run": records.run,
        "decisions": [
            {"action": action, "why": why, **sums} for (action, why), sums in sorted(records.actions.items())
        ],
        "waste": {tool: waste_summary(outcomes) for tool, outcomes in records.outcomes.items()},
        "durations": {
            tool: [
                {"age_s": age_s, **duration_summary(checks, records.run["quantiles"])}
                for age_s, checks in sorted(by_age.items())
            ]
            for tool, by_age in records.checks.items()
        },
        "unreturned": records.unreturned,
    }


def waste_summary(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Predicted and actual waste of interceptions, in token·seconds.

    Returns:
        `interceptions`; `predicted`, `actual` and their `ratio` (actual over predicted, where something was predicted) as
        distributions; `of_all`, the ratio of the sums; `unpredicted`, how many were predicted to waste nothing; `parts`, the
        sums of what the actual waste is made of, and of `queued`, which is not in it.
    """
    predicted = [outcome["predicted_token_s"] for outcome in outcomes]
    actual = [outcome["actual_token_s"] for outcome in outcomes]
    ratios = [is_s / was_s for was_s, is_s in zip(predicted, actual, strict=True) if was_s > 0]
    return {
        "interceptions": len(outcomes),
        "predicted": distribution(predicted),
        "actual": distribution(actual),
        "ratio": distribution(ratios),
        "of_all": sum(actual) / sum(predicted) if sum(predicted) > 0 else None,
        "unpredicted": len(outcomes) - len(ratios),
        "parts": {part: sum(outcome["actual"][part] for outcome in outcomes) for part in PauseCost._fields},
    }


def duration_summary(checks: Sequence[ForecastCheck], quantiles: Sequence[float]) -> dict[str, Any]:
    """Forecasts of one age against what came.

    Returns:
        `calls`; means of the `predicted_s` and the `actual_s` seconds still to come; `error_s`, the mean absolute difference;
        `pinball_s`, the mean quantile loss; `returned`, for each predicted quantile the share that had returned by then.
    """
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


def distribution(values: Iterable[float]) -> Mapping[str, float | None]:
    """Deciles, median and mean; None where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("p10", "p50", "p90", "mean"))
    last = len(ordered) - 1
    return {f"p{part}": ordered[round(last * part / 100)] for part in (10, 50, 90)} | {"mean": fmean(ordered)}
