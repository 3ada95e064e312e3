"""Measured decode steps beside those that the GPU bill predicts from compiled code. Imports no JAX."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.parts import STEP_PARTS

BILL = Path(__file__).parent / "gpu_bill" / "bill.json"
"""Of `python -m benchmarks gpu-bill --out`."""
OTHERWISE = "h100"
"""Whose predictions stand beside a device that the bill has none for."""
LIBRARY = "cuBLAS"


class Predictions(NamedTuple):
    """A table of the bill.

    Attributes:
        origin: its name, commit and date.
        steps: by GPU, model, rows and context, in buckets that fit the rows; `seconds` and `ratio` to the roofline.
    """

    origin: str
    steps: Mapping[tuple[str, str, int, int], Mapping[str, Any]]


def predictions(path: Path = BILL) -> Predictions | None:
    """The latest bill; None if there is none."""
    if not path.exists():
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
        "| step | layers a call | measured | predicted | measured ÷ predicted | × roofline | predicted |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        key = (gpu, row["model"], row["batch"], row["context"])
        step = predicted.steps.get(key) if predicted else None
        seconds, ratio = (0.0, 0.0) if step is None else (step["seconds"], step["ratio"])
        cells = [
            f"{row['model']}, {row['batch']} × {row['context']:,}",
            str(row["layers_per_step"]),
            f"{1e3 * row['seconds']:.2f} ms",
            f"{1e3 * seconds:.2f} ms" if step else "",
            f"{row['seconds'] / seconds:.2f}" if step else "",
            f"{row['times']:.2f}",
            f"{ratio:.2f}" if step else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
