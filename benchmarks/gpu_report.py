"""`python -m benchmarks gpu-report`: files of the suites of GPUs and TPUs as one table against the aims.

Below it stands every decode step measured on a GPU beside the predicted one. Every figure says on which device and when it was
measured. Runs with tiny shapes, or without a device, prove the suite and nothing else: no figure is taken from them.
Imports no JAX.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_aims import AIMS, Parts
from benchmarks.gpu_predictions import predicted_table, predictions
from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.kinds import KINDS
from jinfercept.errors import ConfigError

VERSION = 1
MET = {True: "yes", False: "no", None: "undecided"}


class MeasuredRow(NamedTuple):
    """One file.

    Attributes:
        path: of the file.
        kind: of the suite.
        device: its name, or what there was instead.
        date: when the suite began.
        commit: what ran.
        counts: on a device, and not tiny: figures may be taken from it.
        parts: rows of every part.
        endings: of every part that did not end well, how it ended.
    """

    path: str
    kind: SuiteKind
    device: str
    date: str
    commit: str
    counts: bool
    parts: Parts
    endings: Mapping[str, str]


def gpu_report(files: Sequence[str]) -> int:
    """Print the table of files that `tools/gpu_suite` and `tools/tpu_suite` have written; returns the exit status.

    Raises:
        ConfigError: a file is not one of the suite's.
    """
    measured = [read(path) for path in files]
    predicted = predictions()
    steps = [
        line for run in measured if _is_predicted(run) for line in predicted_table(run.device, run.parts, predicted)
    ]
    print(aims_table(measured) + "\n".join([*steps, ""] if steps else []))
    return 0


def _is_predicted(run: MeasuredRow) -> bool:
    """Whether the bill of GPUs may have its steps."""
    return run.counts and run.kind.name == "gpu"


def read(path: str) -> MeasuredRow:
    """A file of a suite. Raises `ConfigError` if it is none."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        version, machine, parts = report["version"], report["machine"], report["parts"]
        devices = [part["device"] for part in parts.values() if "device" in part]
        assert version == VERSION, f"version {version}"
        kind = KINDS[report.get("suite", "gpu")]
        return MeasuredRow(
            path=path,
            kind=kind,
            device=devices[0] if devices else f"no {kind.device}",
            date=report["date"],
            commit=(machine["commit"] or "unknown")[:12],
            counts=bool(devices) and not report["tiny"],
            parts={name: part["rows"] for name, part in parts.items()},
            endings={name: _ending(part) for name, part in parts.items() if part["status"] != "done"},
        )
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        fix = "name files that tools/gpu_suite or tools/tpu_suite of this version has written"
        raise ConfigError("not a file of a suite", got=f"{path} ({error!r})", fix=fix) from None


def aims_table(measured: Sequence[MeasuredRow]) -> str:
    """The aims in Markdown, a line for every figure; `not measured` where there is none."""
    lines = ["| aim | of | reached | met | measured on |", "|---|---|---|---|---|"]
    for aim in AIMS:
        run_figures = [(run, figure) for run in measured if run.counts for figure in aim.figures(run.parts)]
        for run, figure in run_figures:
            where = f"{run.device}, {run.date[:10]}"
            lines.append(f"| {aim.text} | {figure.what} | {figure.reached} | {MET[figure.met]} | {where} |")
        if not run_figures:
            lines.append(f"| {aim.text} | | not measured | | |")
    for run in measured:
        if not run.counts:
            lines.append(
                f"\n{run.path}: tiny shapes or no {run.kind.device} ({run.device}); it proves the suite, and gives no figure."
            )
        lines += [f"\n{run.path}: {name} {ending}." for name, ending in run.endings.items()]
    return "\n".join(lines) + "\n"


def _ending(part: Mapping[str, Any]) -> str:
    last = part.get("error", "").strip().splitlines()[-1:]
    return ": ".join([f"{part['status']} after {len(part['rows'])} rows", *last])
