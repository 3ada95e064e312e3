"""What decision records say: predicted waste against actual, predicted durations against actual, and what was done how often.

Reads what `sched.records` writes. Distributions are over interceptions that returned, in token·seconds and seconds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sched.outcome import Outcome
from jinfercept.sched.records import VERSION

ALL = "all"
"""The group of every tool."""


class Look(NamedTuple):
    """A forecast, and what came: seconds that were still to come of a call at some age."""

    remaining_s: float
    quantiles_s: Sequence[float]
    actual_s: float


class Records(NamedTuple):
    """One file.

    Attributes:
        run: what its first line says.
        actions: per action and reason, sums over decisions.
        outcomes: per tool, and for `ALL`: the interceptions that returned.
        looks: per tool, and for `ALL`: forecasts by the age that they were due at.
        unreturned: interceptions that ended otherwise.
    """

    run: Mapping[str, Any]
    actions: Mapping[tuple[str, str], Mapping[str, int]]
    outcomes: Mapping[str, Sequence[Mapping[str, Any]]]
    looks: Mapping[str, Mapping[float, Sequence[Look]]]
    unreturned: int


def load_records(path: str | Path) -> Records:
    """Read a file of records; a last line that was cut off is left out.

    Raises:
        ConfigError: no such file, or not of this kind and version.
    """
    lines = _lines(path)
    run = next(lines, None)
    if run is None or run.get("type") != "run" or run.get("version") != VERSION:
        raise ConfigError(
            f"{path} does not hold decisions of version {VERSION}",
            got="another kind of first line" if run else "no line",
            fix="write it with `jinfercept simulate --decisions FILE`",
        )
    actions: dict[tuple[str, str], dict[str, int]] = {}
    outcomes: dict[str, list[dict[str, Any]]] = {ALL: []}
    looks: dict[str, dict[float, list[Look]]] = {ALL: {}}
    unreturned = 0
    for line in lines:
        if line["type"] == "decision":
            sums = actions.setdefault((line["action"], line["why"]), dict.fromkeys(("decisions", *_SUMS), 0))
            sums["decisions"] += 1
            for name in _SUMS:
                sums[name] += line.get(name, 0)
        elif not line["returned"]:
            unreturned += 1
        else:
            tool = "+".join(line["tools"]) or "none"
            for name in (ALL, tool):
                outcomes.setdefault(name, []).append(line)
                by_age = looks.setdefault(name, {})
                for age_s, look in _looks(line, run["ages_s"]):
                    by_age.setdefault(age_s, []).append(look)
    return Records(run, actions, outcomes, looks, unreturned)


_SUMS = ("tokens", "copied_tokens", "freed_tokens", "lost_tokens")


def _lines(path: str | Path) -> Iterator[dict[str, Any]]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the decisions cannot be read", got=f"{path} ({error})", fix="name a .jsonl file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} has a line that is not JSON", got=error, fix="write it anew") from None


def _looks(line: Mapping[str, Any], ages_s: Sequence[float]) -> Iterator[tuple[float, Look]]:
    """The forecasts of an interception, by the last age that was due; those made after the calls' end are left out."""
    for one in line["forecasts"]:
        left_s = -1.0 if line["call_s"] is None else line["call_s"] - one["age_s"]
        if left_s >= 0:
            yield (
                max(age for age in ages_s if age <= one["age_s"]),
                Look(one["remaining_s"], one["quantiles_s"], left_s),
            )


# -- in numbers --------------------------------------------------------------------------------------------------------


def summary(records: Records) -> dict[str, Any]:
    """The tables of `tables` for a program."""
    return {
        "run": records.run,
        "decisions": [
            {"action": action, "why": why, **sums} for (action, why), sums in sorted(records.actions.items())
        ],
        "waste": {tool: waste_summary(outcomes) for tool, outcomes in records.outcomes.items()},
        "durations": {
            tool: [
                {"age_s": age_s, **duration_summary(looks, records.run["quantiles"])}
                for age_s, looks in sorted(by_age.items())
            ]
            for tool, by_age in records.looks.items()
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
        "parts": {part: sum(outcome["actual"][part] for outcome in outcomes) for part in Outcome._fields},
    }


def duration_summary(looks: Sequence[Look], quantiles: Sequence[float]) -> dict[str, Any]:
    """Forecasts of one age against what came.

    Returns:
        `calls`; means of the `predicted_s` and the `actual_s` seconds still to come; `error_s`, the mean absolute difference;
        `pinball_s`, the mean quantile loss; `returned`, for each predicted quantile the share that had returned by then.
    """
    return {
        "calls": len(looks),
        "predicted_s": fmean(look.remaining_s for look in looks),
        "actual_s": fmean(look.actual_s for look in looks),
        "error_s": fmean(abs(look.remaining_s - look.actual_s) for look in looks),
        "pinball_s": fmean(
            pinball(quantile, value_s, look.actual_s)
            for look in looks
            for quantile, value_s in zip(quantiles, look.quantiles_s, strict=True)
        ),
        "returned": {
            f"{quantile:g}": fmean(look.actual_s <= look.quantiles_s[index] for look in looks)
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
