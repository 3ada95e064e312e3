"""Reports of simulations as numbers side by side: means over seeds, a CSV file, places to write. Runs and draws nothing."""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError


class Range(NamedTuple):
    """A number over several seeds."""

    mean: float
    low: float
    high: float


def latency_ms(report: Mapping[str, Any]) -> float | None:
    """Mean normalized latency as the paper defines it, ms per token; None if nothing was finished."""
    if "error" in report:
        return None
    return report["normalized_latency_paper_ms_per_token"]["mean"]


def over_seeds(
    reports: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]
) -> Range | None:
    """Mean, least and most of a value over reports; those that failed or lack it do not count, and None means that all do."""
    found = [number for report in reports if "error" not in report and (number := value(report)) is not None]
    return Range(fmean(found), min(found), max(found)) if found else None


def group[K](reports: Iterable[dict[str, Any]], key: Callable[[Mapping[str, Any]], K]) -> dict[K, list[dict[str, Any]]]:
    """The reports by a key, in the order in which keys appear."""
    groups: dict[K, list[dict[str, Any]]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report)
    return groups


def write_json(path: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """A list of all reports."""
    Path(path).write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")


def write_csv(path: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """A row for each report; nested keys are joined with a point, what a report lacks is empty."""
    rows = [dict(_flat(report)) for report in reports]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _flat(report: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_writable(path: str | Path, flag: str) -> None:
    """Raise `ConfigError` if a file cannot be written there: before the work that fills it, not after."""
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} cannot be written", got=path, fix="name a file in a folder that exists")
