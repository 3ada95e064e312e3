"""Reports of simulations as numbers side by side: means over seeds, a CSV file, places to write. Runs and draws nothing."""

import csv
import json
import math
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
    """Mean normalized latency as the paper defines it, ms per token; None if nobody arrived or the run failed."""
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


def write_json(path: str | Path, found: Any) -> None:
    """What was found; numbers that JSON does not have are null."""
    Path(path).write_text(json.dumps(_finite(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """A row for each report; nested keys are joined with a point, what a report lacks is empty. Only JSON has `slowness`."""
    rows = [dict(_flat({name: value for name, value in report.items() if name != "slowness"})) for report in reports]
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
    try:
        there = path.exists()
        if not there or path.is_file() or path.is_dir():  # opening a pipe would wait, or end it
            path.open("a").close()
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{flag} cannot be written", got=f"{path} ({reason})", fix="name a file in a folder that exists"
        ) from None


def check_outputs(outputs: Iterable[tuple[str, str | Path | None]]) -> None:
    """Raise `ConfigError` if one of a command's files cannot be written, or if two of them are the same.

    Args:
        outputs: flags and their paths; None: not asked for.
    """
    seen: dict[Path, str] = {}
    for flag, path in outputs:
        if path is None:
            continue
        check_writable(path, flag)
        place = Path(path).resolve()
        if place in seen and (place.is_file() or not place.exists()):
            raise ConfigError(f"{flag} and {seen[place]} name the same file", got=path, fix="give each its own")
        seen[place] = flag


def write_all(writers: Mapping[str, Callable[[], object]]) -> None:
    """Call every writer, also if another one failed; then raises `ConfigError` with what was not written.

    Args:
        writers: by what each of them writes.
    """
    failed = []
    for name, write in writers.items():
        try:
            write()
        except OSError as error:
            failed.append(f"{name} ({error.strerror})")
    if failed:
        raise ConfigError("not written", got="; ".join(failed), fix="make room there, or name another file")
