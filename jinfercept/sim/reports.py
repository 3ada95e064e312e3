"""Reports of simulations: percentiles, means over seeds, groups, tables at a terminal, JSON files, checks of output paths."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jinfercept.errors import ConfigError


class TextTable(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def shown(self) -> Table:
        shown = plain_table(self.columns, title=self.title)
        for row in self.rows:
            shown.add_row(*row)
        return shown


def plain_table(
    columns: Sequence[str], *, left: Collection[str] = (), title: str | None = None, caption: str | None = None
) -> Table:
    """A table without lines, whose columns are numbers but for those on the left."""
    table = Table(title=title, title_justify="left", caption=caption, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def check_least(flag: str, value: float, least: float) -> None:
    """Raise `ConfigError` if an option is too small, or infinite."""
    if not least <= value < math.inf:
        problem = "infinite" if value > least else "too small"
        raise ConfigError(f"{flag} is {problem}", got=value, fix=f"at least {least}")


def listed(texts: Sequence[str]) -> list[str]:
    """The names in texts, separated by commas; each once."""
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))


def numbers[N: (int, float)](flag: str, texts: Sequence[str], kind: type[N]) -> list[N]:
    """The numbers in texts, separated by commas; each once, ascending. Raises `ConfigError` for a text that is no number."""
    try:
        return sorted({kind(text) for text in listed(texts)})
    except ValueError:
        fix = "whole numbers, as 0,1,2" if kind is int else "numbers, as 3.5,5"
        raise ConfigError(f"{flag} is not a number", got=", ".join(texts), fix=fix) from None


def number_text(value: float) -> str:
    """A number with about four digits; thousands as k and M."""
    for least, size, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 1000 else f"{value:.4g}"


def show(shown: Table) -> None:
    """Print a table; a terminal that is too narrow wraps its lines and cuts nothing."""
    console = Console()
    needed = console.measure(shown, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(shown)


T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 %, by degrees of freedom; then 2."""


class Range(NamedTuple):
    """Mean, least and largest value over several seeds."""

    mean: float
    low: float
    high: float


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Range | None:
    """The ratio of the sums of pairs, and the 95 % interval of the pairs' ratios; None for fewer than two pairs above 0."""
    logs = [math.log(own / other) for own, other in pairs if own > 0 and other > 0]
    if len(logs) < 2:
        return None
    # Student's t of the logarithms
    t = T95[len(logs) - 1] if len(logs) <= len(T95) else 2.0
    half = t * stdev(logs) / math.sqrt(len(logs))
    whole = sum(own for own, _ in pairs) / sum(other for _, other in pairs)
    return Range(whole, math.exp(fmean(logs) - half), math.exp(fmean(logs) + half))


def ranking[S](values: Mapping[str, Mapping[S, float]], *, larger: bool = False) -> list[str]:
    """A line for each contender, the best first: its mean over seeds, and its ratio to the best one's, seed by seed.

    `values` are numbers by contender and seed. With `larger`, the larger number is the better one.
    """
    means = {name: fmean(by_seed.values()) for name, by_seed in values.items()}
    best, *others = sorted(means, key=means.__getitem__, reverse=larger)
    lines = [f"{best}: {means[best]:.3g}"]
    for name in others:
        seeds = values[name].keys() & values[best].keys()
        ratio = paired_ratio([(values[name][seed], values[best][seed]) for seed in seeds])
        if ratio is None:
            how = "too few seeds to say whether they differ" if len(seeds) < 2 else "no ratio: some are 0"
        else:
            how = f"{ratio.mean:.2f} × ({ratio.low:.2f}–{ratio.high:.2f})"
            how += ", not to be told apart" if ratio.low <= 1.0 <= ratio.high else ""
        lines.append(f"{name}: {means[name]:.3g}, {how}")
    return lines


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
    """Raise `ConfigError` if a file of a command, given by its flag, cannot be written, or if two are the same."""
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
