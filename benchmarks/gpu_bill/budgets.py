"""Compares the bill's rows with `budgets.toml`."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "budgets.toml"
CONDITIONS = ("gpu", "kind", "model", "bucket", "library", "decode_only")


def budgets() -> list[dict[str, Any]]:
    """The budgets, in the order of the file."""
    return tomllib.loads(PATH.read_text(encoding="utf-8"))["budget"]


def broken(rows: Iterable[Mapping[str, Any]], limits: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for every number above its budget, and for every executable that did not compile."""
    limits = list(limits)
    found = list[str]()
    for row in rows:
        title = f"{row['num_devices']} × {row['gpu']} {row['model']} {row['executable']} with {row['library']}"
        if row.get("error"):
            found.append(f"{title}: {row['error']}")
            continue
        for name, most in _limits(row, limits).items():
            if row[name] is not None and row[name] > most:
                found.append(f"{title}: {name} is {row[name]:g}, and its budget {most:g}")
    return found


def _limits(row: Mapping[str, Any], limits: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers that hold for a row."""
    row = {**row, "decode_only": row["executable"].startswith("decode ")}
    chosen: dict[str, float] = {}
    for limit in limits:
        if all(limit[name] == row[name] for name in CONDITIONS if name in limit):
            chosen |= {name: most for name, most in limit.items() if name not in CONDITIONS}
    return chosen
