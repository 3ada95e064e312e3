"""`python -m benchmarks gpu-report`: files of the suites of GPUs and TPUs as one table against the aims,
with details and a picture.

Below it stands every decode step measured on a GPU beside the predicted one. Every figure says on which device and when it was
measured. Runs with tiny shapes, or without a device, prove the suite and nothing else: no figure is taken from them.
Imports no JAX.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu_aims import AIMS, Parts, Rows
from benchmarks.gpu_predictions import predicted_table, predictions
from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.kinds import KINDS
from benchmarks.suite.parts import LINK_PARTS, STEP_PARTS
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERSION = 1
STEP = ("model", "layers_per_step", "step", "batch", "context")
ATTENTION = ("heads", "rows", "chunk", "context", "implementation", "seconds")
DETAILS: Mapping[str, Sequence[str]] = {
    "smoke": (
        "check",
        "ok",
        "seconds",
        "load_s",
        "compile_s",
        "kv_tokens",
        "peak_bytes",
        "policy",
        "copied_in_tokens",
        "different",
        "layer_bytes",
        "wrong_steps",
        "wrong_pages",
    ),
    "transfers": (
        "transfer_parts",
        "staging_pages",
        "way",
        "share",
        "pages",
        "step_s",
        "dispatch_s",
        "slowdown",
        "bytes_per_s",
        "link_share",
        "embed_s",
        "first_kernel_s",
        "first_array_s",
        "last_array_s",
        "copy",
        "count",
        "busy_s",
        "hidden_share",
    ),
    "correctness": ("check", "heads", "model", "page_size", "dtype", "pages", "policy", "by", "error", "limit", "ok"),
    "steps": (
        *STEP,
        "chunk",
        "sampling",
        "seconds",
        "dispatch_s",
        "bound",
        "times",
        "graphs",
        "step_s",
        "busy_s",
        "idle_share",
        "kernel",
        "shape",
        "calls",
        "gpu_s",
        "error",
        "ok",
    ),
    "uploads": (
        "what",
        "way",
        "arrays",
        "bytes",
        "array_us",
        "call_s",
        "ready_s",
        "before",
        "upload_s",
        "kernel_s",
        "bytes_per_s",
    ),
    "kernels": (*ATTENTION, "copy_share", "matmul_share", "error"),
    "experts": (
        "model",
        "tokens",
        "used",
        "implementation",
        "seconds",
        "copy_share",
        "matmul_share",
        "off",
        "ok",
        "error",
    ),
    "products": ("weight", "tokens", "seconds", "copy_share", "times", "off", "ok"),
    "torch_peer": (*ATTENTION, "bytes_per_s", "flops_per_s", "error"),
    "idle": ("model", "depth", "batch", "context", "step_s", "idle_share", "by_wall", "largest_gap_s"),
    "policies": (
        "policy",
        "order",
        "latency",
        "ttft_s",
        "recomputed_tokens",
        "copied_out_tokens",
        "copied_in_tokens",
        "unfinished",
    ),
}
"""The columns of every part's table; what a row lacks is empty."""


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


def gpu_report(files: Sequence[str], *, out: str | None, plot: str | None) -> int:
    """Run the command; returns the exit status.

    Args:
        files: of `tools/gpu_suite` and `tools/tpu_suite`.
        out: Markdown file to write, with all details; else the table goes to standard output.
        plot: picture to write.

    Raises:
        ConfigError: a file is not one of the suite's, or something cannot be written.
    """
    for path, flag in ((out, "--out"), (plot, "--plot")):
        if path:
            check_writable(path, flag)
    if plot:
        check_drawing(plot)
    measured = [read(path) for path in files]
    predicted = predictions()
    steps = [
        line for run in measured if _is_predicted(run) for line in predicted_table(run.device, run.parts, predicted)
    ]
    summary = aims_table(measured) + "\n".join([*steps, ""] if steps else [])
    print(summary)
    if out:
        Path(out).write_text(f"# Figures\n\n{summary}\n{details(measured)}", encoding="utf-8")
    if plot:
        draw(measured, plot)
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
            lines.append(
                f"| {aim.text} | {figure.what} | {figure.reached} | {'yes' if figure.met else 'no'} | {where} |"
            )
        if not run_figures:
            lines.append(f"| {aim.text} | | not measured | | |")
    for run in measured:
        if not run.counts:
            lines.append(
                f"\n{run.path}: tiny shapes or no {run.kind.device} ({run.device}); it proves the suite, and gives no figure."
            )
        lines += [f"\n{run.path}: {name} {ending}." for name, ending in run.endings.items()]
    return "\n".join(lines) + "\n"


def details(measured: Sequence[MeasuredRow]) -> str:
    """All rows in Markdown, a section for every file and a table for every part."""
    lines: list[str] = []
    for run in measured:
        lines.append(f"\n## {run.device}, {run.date}, commit {run.commit}\n")
        for name, rows in run.parts.items():
            columns = [
                column
                for column in DETAILS[run.kind.parts[name].subject]
                if any(_value(row, column) is not None for row in rows)
            ]
            if columns:
                lines += [f"\n### {name}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                lines += [f"| {' | '.join(_cell(column, _value(row, column)) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def draw(measured: Sequence[MeasuredRow], path: str) -> None:
    """Uploads, transfers, decode attention and decode steps of all runs. Raises `ConfigError` as `check_drawing` does."""
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), layout="constrained")
    uploads, transfers, decode, steps = figure.subplots(2, 2).flat
    for run in measured:
        name = f"{run.device}, {run.date[:10]}" if run.counts else f"{run.device}: proves nothing"
        _draw_uploads(uploads, name, run.parts.get("uploads", ()))
        _draw_transfers(transfers, name, [row for part in LINK_PARTS for row in run.parts.get(part, ())])
        _draw_decode(decode, name, run.parts.get("kernels", ()))
        _draw_steps(steps, name, [row for part in STEP_PARTS for row in run.parts.get(part, ())])
    for axes in (uploads, transfers, decode, steps):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


def _draw_uploads(axes: "Axes", name: str, rows: Rows) -> None:
    for way in ("upload", "out", "in"):
        points = [(row["arrays"], row["array_us"]) for row in rows if row["what"] == "put" and row["way"] == way]
        _curve(axes, points, f"{way}, {name}")
    axes.set(title="the host's time for an array", xlabel="arrays of one call", ylabel="µs", xscale="log")


def _draw_transfers(axes: "Axes", name: str, rows: Rows) -> None:
    for way in ("out", "in", "both"):
        for parts, staging in sorted({(row["transfer_parts"], row["staging_pages"]) for row in rows}):
            points = [
                (row["link_share"], row["slowdown"])
                for row in rows
                if (row["way"], row["transfer_parts"], row["staging_pages"]) == (way, parts, staging)
            ]
            _curve(axes, points, f"{way}, {parts} parts, arrays of {staging}, {name}")
    axes.set(title="decode steps under transfers", xlabel="share of the link's bandwidth", ylabel="growth of step time")


def _draw_decode(axes: "Axes", name: str, rows: Rows) -> None:
    kinds = sorted({(row["implementation"], row["heads"], row["rows"]) for row in rows if row["chunk"] == 1})
    for kind in kinds:
        points = [
            (row["context"], row["copy_share"])
            for row in rows
            if row["chunk"] == 1 and "error" not in row and kind == (row["implementation"], row["heads"], row["rows"])
        ]
        _curve(axes, points, f"{kind[0]}, {kind[1]}, batch {kind[2]}, {name}")
    axes.set(title="paged decode", xlabel="context", ylabel="share of the copy bandwidth", xscale="log")


def _draw_steps(axes: "Axes", name: str, rows: Rows) -> None:
    decoding = [row for row in rows if row["step"] == "decode" and row["sampling"] == "greedy"]
    for kind in sorted({(row["model"], row["batch"], row["layers_per_step"]) for row in decoding}):
        points = [
            (row["context"], row["times"])
            for row in decoding
            if kind == (row["model"], row["batch"], row["layers_per_step"])
        ]
        _curve(axes, points, f"{kind[0]}, batch {kind[1]}, {kind[2]} layers a step, {name}")
    axes.set(title="decode steps", xlabel="context", ylabel="times the roofline", xscale="log")


def _curve(axes: "Axes", points: Sequence[tuple[float, float]], label: str) -> None:
    if points:
        axes.plot(*zip(*sorted(points), strict=True), marker=".", label=label)


def _ending(part: Mapping[str, Any]) -> str:
    last = part.get("error", "").strip().splitlines()[-1:]
    return ": ".join([f"{part['status']} after {len(part['rows'])} rows", *last])


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column == "latency":
        column, row = "mean", row["normalized_latency_paper_ms_per_token"]
    value = row.get(column)
    return value["mean"] if isinstance(value, Mapping) else value


def _cell(column: str, value: Any) -> str:
    """A value with its unit, as the column's name says."""
    if not isinstance(value, float):
        return "" if value is None else str(value).replace("|", "/")
    if column.endswith("_s") and not column.endswith("per_s") and column != "ttft_s":
        return f"{1e3 * value:.3f} ms"
    if column.endswith("per_s"):
        return f"{value / 1e12:.2f} T/s" if value > 1e12 else f"{value / 1e9:.2f} G/s"
    return f"{value:.1%}" if column.endswith("share") or column == "slowdown" else f"{value:.3g}"
