"""Reports of simulations: percentiles, means over seeds, groups, JSON files, checks of output paths."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError


class Range(NamedTuple):
    """Mean, least and largest value over several seeds."""

    mean: float
    low: float
    high: float


def latency_ms(report: Mapping[str, Any]) -> float | None:
    """Mean normalized latency as the paper defines it, ms per token; None without requests, or for a failed run."""
    if "error" in report:
        return None
    return report["normalized_latency_paper_ms_per_token"]["mean"]


def percentiles(values: Iterable[float | None], percents: Sequence[int]) -> dict[str, float] | None:
    """`mean` and the percentiles `p50`, … of the values, Nones left out; None if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return {"mean": fmean(ordered)} | {
        f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in percents
    }


def over_seeds(
    reports: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]
) -> Range | None:
    """Range of a value over reports, without those that failed or lack it; None if no report is left."""
    numbers = [number for report in reports if "error" not in report and (number := value(report)) is not None]
    return Range(fmean(numbers), min(numbers), max(numbers)) if numbers else None


def group[K](reports: Iterable[dict[str, Any]], key: Callable[[Mapping[str, Any]], K]) -> dict[K, list[dict[str, Any]]]:
    """The reports by key, in the order of the keys' first appearance."""
    groups: dict[K, list[dict[str, Any]]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report)
    return groups


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON; numbers that are not finite become null."""
    Path(path).write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_writable(path: str | Path, flag: str) -> None:
    """Raise `ConfigError` if a file cannot be written, before the work that fills it."""
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


def write_files(writers: Mapping[str | None, Callable[[str], object]]) -> None:
    """Write the files that have a path. Raises `ConfigError` with those that cannot be written."""
    write_all({path: partial(write, path) for path, write in writers.items() if path is not None})


def write_all(writers: Mapping[str, Callable[[], object]]) -> None:
    """Call every writer, even if another one fails. Raises `ConfigError` with the files that were not written."""
    failed = []
    for name, write in writers.items():
        try:
            write()
        except OSError as error:
            failed.append(f"{name} ({error.strerror})")
    if failed:
        raise ConfigError("files not written", got="; ".join(failed), fix="make room there, or name another file")
