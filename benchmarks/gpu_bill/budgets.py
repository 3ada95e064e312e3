"""What is done with a bill of GPUs or of TPUs: written to a file, compared with budgets, and written into these."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

PATH = Path(__file__).parent / "budgets.toml"
"""Of GPUs."""
CONDITIONS = ("gpu", "kind", "model", "bucket", "library", "decode_only")


def budgets(path: Path = PATH) -> list[dict[str, Any]]:
    """The budgets, in the order of the file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))["budget"]


def finish(bill: Mapping[str, Any], path: Path, *, out: str | None, set_budgets: bool, check: bool) -> int:
    """Write the bill to `out`, its numbers into the budgets at `path`, and compare them, as the command asks.

    Returns:
        The exit status: 1 if a budget is broken that was to be checked.
    """
    if out is not None:
        Path(out).write_text(_by_row(bill), encoding="utf-8")
    rows = bill["executables"]
    if set_budgets:
        path.write_text(rewritten(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return _print_broken(broken(rows, budgets(path))) if check else 0


def _by_row(bill: Mapping[str, Any]) -> str:
    """JSON with a line for every row of a table, so that two bills can be compared line by line."""
    parts = []
    for name, value in bill.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f'"{name}": [\n  {rows}\n ]' if rows else f'"{name}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def broken(rows: Iterable[Mapping[str, Any]], limits: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for every number above its budget, and for every executable that did not compile."""
    limits = list(limits)
    sentences = list[str]()
    for row in rows:
        title = f"{row['num_devices']} × {row['gpu']} {row['model']} {row['executable']} with {row['library']}"
        if row.get("error"):
            sentences.append(f"{title}: {row['error']}")
            continue
        for name, most in _limits(row, limits).items():
            if row[name] is not None and row[name] > most:
                sentences.append(f"{title}: {name} is {row[name]:g}, and its budget {most:g}")
    return sentences


def rewritten(text: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of `budgets.toml` with the largest numbers of these rows. What no row has stays, and so do the comments."""
    limits = tomllib.loads(text)["budget"]
    largest: dict[tuple[int, str], float] = {}
    for row in rows:
        for name, place in ({} if row.get("error") else _deciding(row, limits)).items():
            if row[name] is not None:
                largest[place, name] = max(row[name], largest.get((place, name), 0))
    lines, place = list[str](), -1
    for line in text.splitlines():
        place += line.startswith("[[budget]]")
        number = re.match(r"(\w+) = [\d.]+", line)
        if number and (most := largest.get((place, number[1]))) is not None:
            line = f"{number[1]} = {most:g}{line[number.end() :]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _print_broken(sentences: Sequence[str]) -> int:
    """Print which budgets are broken; returns the exit status, 1 if one is."""
    console = Console()
    for sentence in sentences:
        console.print(f"broken: {sentence}", highlight=False)
    console.print(f"{len(sentences)} budgets are broken" if sentences else "every budget holds", highlight=False)
    return 1 if sentences else 0


def _limits(row: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers that hold for a row."""
    return {name: limits[place][name] for name, place in _deciding(row, limits).items()}


def _deciding(row: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The place of the budget that counts for a row, number by number: the last that fits."""
    row = {**row, "decode_only": row["executable"].startswith("decode ")}
    places: dict[str, int] = {}
    for place, limit in enumerate(limits):
        if all(limit[name] == row[name] for name in CONDITIONS if name in limit):
            places |= dict.fromkeys((name for name in limit if name not in CONDITIONS), place)
    return places
