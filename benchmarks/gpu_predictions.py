"""Measured decode steps beside those that the GPU bill predicts from compiled code. Imports no JAX."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.parts import STEP_PARTS

TABLES = Path(__file__).parent / "gpu_bill" / "tables"
NAMES = ("after.json", "before.json")
"""Tables of `python -m benchmarks gpu-bill --out`; the first that is there is taken."""
OTHERWISE = "h100"
"""Whose predictions stand beside a device that the bill has none for."""
LIBRARY = "cuBLAS"


class Predictions(NamedTuple):
    """A table of the bill.

    Attributes:
        origin: its name, commit and date.
        steps: by GPU, model, rows and context, in buckets that fit the rows; `seconds` and `ratio` to the roofline, and under
            `pessimistic` both with the pessimistic rates.
    """

    origin: str
    steps: Mapping[tuple[str, str, int, int], Mapping[str, Any]]


def predictions(folder: Path = TABLES) -> Predictions | None:
    """The latest table; None if there is none."""
    path = next((folder / name for name in NAMES if (folder / name).exists()), None)
    if path is None:
        return None
    bill = json.loads(path.read_text(encoding="utf-8"))
    steps = {
        (row["gpu"], row["model"], row["rows"], row["context"]): row
        for row in bill["steps"]
        if row["library"] == LIBRARY and not row["default_buckets"]
    }
    return Predictions(f"{path.name} of commit {bill['commit']}, {bill['date']}", steps)


def predicted_table(
    device: str, parts: Mapping[str, Sequence[Mapping[str, Any]]], predicted: Predictions | None
) -> list[str]:
    """Lines of Markdown: every decode step of greedy rows that was measured, and its prediction if there is one."""
    steps = [row for name in STEP_PARTS for row in parts.get(name, ()) if row["step"] == "decode"]
    rows = [row for row in steps if row["sampling"] == "greedy"]
    if not rows:
        return []
    gpus = {key[0] for key in predicted.steps} if predicted else set()
    gpu = next((name for name in sorted(gpus) if name in device.lower()), OTHERWISE)
    origin = f"for {gpu.upper()}, {predicted.origin}" if predicted else "no table of the GPU bill is there"
    lines = [
        f"\nDecode steps on {device}; predicted: {origin}.\n",
        "| step | layers a call | measured | predicted | measured ÷ predicted | with the pessimistic rates "
        "| measured ÷ pessimistic | × roofline | predicted | pessimistic |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        key = (gpu, row["model"], row["batch"], row["context"])
        step = predicted.steps.get(key) if predicted else None
        likely, worse = (
            ("", "", "") if guess is None else _expected(row["seconds"], guess)
            for guess in (step, step and step.get("pessimistic"))
        )
        cells = [
            f"{row['model']}, {row['batch']} × {row['context']:,}",
            str(row["layers_per_step"]),
            f"{1e3 * row['seconds']:.2f} ms",
            *likely[:2],
            *worse[:2],
            f"{row['times']:.2f}",
            likely[2],
            worse[2],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _expected(seconds: float, step: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{1e3 * step['seconds']:.2f} ms", f"{seconds / step['seconds']:.2f}", f"{step['ratio']:.2f}"
