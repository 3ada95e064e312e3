"""Reports as rows of a CSV file."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Write a row for each report. Nested keys are joined by points; missing values are empty; `slowness` is left out."""
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
