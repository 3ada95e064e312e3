"""`python -m benchmarks gpu-report`: files of the suites of GPUs and TPUs as one table against the aims.

Below it stands every decode step measured on a GPU beside the one that the GPU bill predicts from compiled code. Every figure
says on which device and when it was measured. Runs with tiny shapes, or without a device, prove the suite and nothing else:
no figure is taken from them. Imports no JAX.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.kinds import KINDS
from benchmarks.suite.parts import ATTENTION_PARTS, LINK_PARTS, RIGHT_PARTS, STEP_PARTS
from jinfercept.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]
Parts = Mapping[str, Rows]
"""The rows of one run of the suite, by part; what was not run is not there."""

PEERS = ("cudnn", "torch", "flashinfer")
OURS = "copy_ahead"
RESAMPLES = 4000

DECODE_SHARE = 0.85
CHUNK_RATIO = 0.8
STEP_TIMES = 1.25
LINK_SHARE = 0.8
SLOWDOWN = 0.05
IDLE = 0.03


class Figure(NamedTuple):
    """One number of one run.

    Attributes:
        what: it is of.
        reached: in words.
        met: whether that is the aim; None: it cannot be told.
    """

    what: str
    reached: str
    met: bool | None


class Aim(NamedTuple):
    """An aim, and how a run's rows answer it: with no figure where they do not."""

    text: str
    figures: Callable[[Parts], list[Figure]]


def _decode(parts: Parts) -> list[Figure]:
    cases = _fastest(row for row in _attention(parts) if row["chunk"] == 1 and row["implementation"] not in PEERS)
    chosen = [row for row in cases if row["rows"] >= 32 and row["context"] >= 2048]
    figures = []
    for (heads,), rows in _by(chosen, "heads").items():
        least = min(rows, key=lambda row: row["copy_share"])
        most = max(row["copy_share"] for row in rows)
        where = f"{least['rows']} × {least['context']:,}, {least['implementation']}"
        reached = f"{least['copy_share']:.0%} at least ({where}), {most:.0%} at most, {len(rows)} cases"
        figures.append(Figure(f"decode {heads}", reached, least["copy_share"] >= DECODE_SHARE))
    return figures


def _chunks(parts: Parts) -> list[Figure]:
    rows = [row for row in _attention(parts) if row["chunk"] > 1]
    ours = _fastest(row for row in rows if row["implementation"] not in PEERS)
    peers = {_case(row): row for row in _fastest(row for row in rows if row["implementation"] in PEERS)}
    figures = []
    for row in ours:
        peer = peers.get(_case(row))
        if peer is None:
            continue
        ratio = peer["seconds"] / row["seconds"]
        what = f"{row['heads']}, {row['rows']} × {row['chunk']:,} of {row['context']:,}"
        reached = f"{ratio:.2f} × {peer['implementation']}, {row['matmul_share']:.0%} of the matmul rate"
        figures.append(Figure(what, reached, ratio >= CHUNK_RATIO))
    return figures


def _steps(parts: Parts) -> list[Figure]:
    measured = [row for name in STEP_PARTS for row in parts.get(name, ())]
    chosen = [row for row in measured if row["step"] == "decode" and row["batch"] == 64 and row["sampling"] == "greedy"]
    figures = []
    for (model, context), rows in _by(chosen, "model", "context").items():
        best = min(rows, key=lambda row: row["times"])
        reached = f"{best['times']:.2f} × its roofline: {1e3 * best['seconds']:.2f} ms, {best['layers_per_step']} layers a step"
        figures.append(Figure(f"{model}, 64 × {context:,}", reached, best["times"] <= STEP_TIMES))
    return figures


def _link(parts: Parts) -> list[Figure]:
    measured = [row for name in LINK_PARTS for row in parts.get(name, ())]
    loaded = [row for row in measured if row["way"] in ("out", "in", "both")]
    figures = []
    for (way, staging), rows in _by(loaded, "way", "staging_pages").items():
        full = [row for row in rows if row["link_share"] >= LINK_SHARE]
        best = min(full, key=lambda row: row["slowdown"]) if full else max(rows, key=lambda row: row["link_share"])
        rate = f"{best['link_share']:.0%} of the link, {best['bytes_per_s'] / 1e9:.1f} GB/s"
        reached = f"{best['slowdown']:+.1%} step time at {rate}"
        what = f"decode, {way}, arrays of {staging}"
        figures.append(Figure(what, reached, bool(full) and best["slowdown"] <= SLOWDOWN))
    return figures


def _idle(parts: Parts) -> list[Figure]:
    return [
        Figure(
            f"{row['model']}, batch {row['batch']}",
            f"{row['idle_share']:.1%} of a trace, {row['by_wall']:.1%} by the wall clock",
            met,
        )
        for row in parts.get("idle", ())
        if row["depth"] == 1 and "idle_share" in row
        for met in [row["idle_share"] <= IDLE]
    ]


def _policies(parts: Parts) -> list[Figure]:
    """Ours against the best of the others, by the mean normalized latency of the paper."""
    latencies = {
        row["policy"]: row["normalized_latency_paper_ms_per_token"]["mean"] for row in parts.get("policies", ())
    }
    unfinished = {row["policy"]: row["unfinished"] for row in parts.get("policies", ())}
    ours = latencies.pop(OURS, None)
    if ours is None or not latencies:
        return []
    best = min(latencies, key=lambda policy: latencies[policy])
    reached = (
        f"{ours:.1f} ms/token, {unfinished[OURS]} unfinished; {best} {latencies[best]:.1f}, {len(latencies)} others"
    )
    model = next(row["model"] for row in parts["policies"])
    met = ours <= latencies[best] and unfinished[OURS] <= min(unfinished[policy] for policy in latencies)
    return [Figure(f"scaled mixed workload, {model}", reached, met)]


def _agents(parts: Parts) -> list[Figure]:
    """The mean turn delay of ours over that of each other contender."""
    return [figure for part in ("agents", "long_agents") for figure in _agents_of(parts.get(part, ()))]


def _agents_of(measured: Rows) -> list[Figure]:
    simulated = {_contender(row): row["simulated"]["turn_delay_s"]["mean"] for row in measured if "simulated" in row}
    runs = [row for row in measured if "turn_delay_s" in row]
    return [_compared(ours, other, simulated) for ours in runs[:1] if ours["policy"] == OURS for other in runs[1:]]


def _compared(ours: Mapping[str, Any], other: Mapping[str, Any], simulated: Mapping[Any, float]) -> Figure:
    (mean, p99), (other_mean, other_p99) = (
        [row["turn_delay_s"][name] for name in ("mean", "p99")] for row in (ours, other)
    )
    load = ours["workload"]
    what = f"{load['live']} sessions, tokens × {load['scale_tokens']:g}, {load['model']}, against {' '.join(_contender(other))}"
    turns = f"in {ours['requests']} and {other['requests']} turns"
    reached = f"{mean:.2f} and {other_mean:.2f} s {turns}, {mean / other_mean:.2f} ×"
    met = None
    if "turns" in ours:
        low, high = ratio_interval(ours["turns"], other["turns"])
        met = None if low <= 1 <= high else high < 1
        reached += f" (95 % interval {low:.2f} to {high:.2f}{': it decides nothing' if met is None else ''})"
    else:
        reached += " (turns were not recorded, so it has no interval)"
    if {_contender(ours), _contender(other)} <= simulated.keys():
        reached += f"; {simulated[_contender(ours)] / simulated[_contender(other)]:.2f} × in the simulator"
    return Figure(what, f"{reached}; p99 {p99:.1f} and {other_p99:.1f} s", met)


def _contender(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["policy"], row["order"]


def ratio_interval(ours: Rows, others: Rows) -> tuple[float, float]:
    """The 95 % interval of the ratio of mean delays, by a bootstrap.

    Sessions are drawn, each with all of its turns under both contenders: turns of a session depend on each other.
    """
    totals = dict[int, list[float]]()
    for place, turns in ((0, ours), (2, others)):
        for turn in turns:
            total = totals.setdefault(turn["session"], [0.0] * 4)
            total[place] += turn["delay_s"]
            total[place + 1] += 1
    table = np.array(list(totals.values()))
    drawn = table[np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))].sum(1)
    drawn = drawn[(drawn > 0).all(1)]
    low, high = np.quantile(drawn[:, 0] * drawn[:, 3] / (drawn[:, 1] * drawn[:, 2]), [0.025, 0.975])
    return float(low), float(high)


def _right(parts: Parts) -> list[Figure]:
    checks = [row for name in RIGHT_PARTS for row in parts.get(name, ())]
    return [
        Figure(check, f"{sum(row['ok'] for row in rows)} of {len(rows)} checks", all(row["ok"] for row in rows))
        for (check,), rows in _by(checks, "check").items()
    ]


AIMS: tuple[Aim, ...] = (
    Aim("a default start works, and moved contexts and kernels compute what the reference computes", _right),
    Aim(f"the link in use (≥ {LINK_SHARE:.0%}) costs ≤ {SLOWDOWN:.0%} of step time", _link),
    Aim(f"paged decode ≥ {DECODE_SHARE:.0%} of the copy bandwidth (batch ≥ 32, context ≥ 2,048)", _decode),
    Aim(f"chunk attention ≥ {CHUNK_RATIO} × the best peer", _chunks),
    Aim(f"decode step at batch 64 ≤ {STEP_TIMES} × its roofline", _steps),
    Aim(f"device idle between steps ≤ {IDLE:.0%} at depth 1", _idle),
    Aim(f"{OURS} is the best of the six policies in real time", _policies),
    Aim(f"turns of agents wait less under {OURS} than under the others", _agents),
)
"""The aims, in the order of the rows of the report."""


def _attention(parts: Parts) -> list[Mapping[str, Any]]:
    rows = [row for name in ATTENTION_PARTS for row in parts.get(name, ())]
    return [row for row in rows if "seconds" in row]


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("heads", "rows", "chunk", "context"))


def _fastest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fastest row of every case."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        best_row = best.get(_case(row))
        if best_row is None or row["seconds"] < best_row["seconds"]:
            best[_case(row)] = row
    return list(best.values())


def _by(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


BILL = Path(__file__).parent / "gpu_bill" / "bill.json"
"""Of `python -m benchmarks gpu-bill --out`."""
OTHERWISE = "h100"
"""Whose predictions stand beside a device that the bill has none for."""
LIBRARY = "cuBLAS"


class Predictions(NamedTuple):
    """A table of the bill.

    Attributes:
        origin: its name, commit and date.
        steps: by GPU, model, decode rows, their context and the tokens of a chunk beside them, in buckets that fit the tokens;
            `seconds` and `ratio` to the roofline.
    """

    origin: str
    steps: Mapping[tuple[str, str, int, int, int], Mapping[str, Any]]


def predictions(path: Path = BILL) -> Predictions | None:
    """The latest bill; None if there is none."""
    if not path.exists():
        return None
    bill = json.loads(path.read_text(encoding="utf-8"))
    steps = {
        (row["gpu"], row["model"], row["rows"], row["context"], row["chunk"]): row
        for row in bill["steps"]
        if row["library"] == LIBRARY and (row["chunk"] or not row["default_buckets"])
    }
    return Predictions(f"{path.name} of commit {bill['commit']}, {bill['date']}", steps)


def predicted_table(
    device: str, parts: Mapping[str, Sequence[Mapping[str, Any]]], predicted: Predictions | None
) -> list[str]:
    """Lines of Markdown: every step of greedy rows that was measured, and its prediction if there is one."""
    steps = [row for name in STEP_PARTS for row in parts.get(name, ()) if row["step"] in ("decode", "mixed")]
    rows = [row for row in steps if row["sampling"] == "greedy"]
    if not rows:
        return []
    gpus = {key[0] for key in predicted.steps} if predicted else set()
    gpu = next((name for name in sorted(gpus) if name in device.lower()), OTHERWISE)
    origin = f"for {gpu.upper()}, {predicted.origin}" if predicted else "no table of the GPU bill is there"
    lines = [
        f"\nSteps on {device}; predicted: {origin}.\n",
        "| step | layers a call | measured | predicted | measured ÷ predicted | × roofline | predicted |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        chunk = row["chunk"]
        key = (gpu, row["model"], row["batch"], row["context"], chunk)
        step = predicted.steps.get(key) if predicted else None
        seconds, ratio = (0.0, 0.0) if step is None else (step["seconds"], step["ratio"])
        cells = [
            f"{row['model']}, {row['batch']} × {row['context']:,}" + (f" + {chunk:,}" if chunk else ""),
            str(row["layers_per_step"]),
            f"{1e3 * row['seconds']:.2f} ms",
            f"{1e3 * seconds:.2f} ms" if step else "",
            f"{row['seconds'] / seconds:.2f}" if step else "",
            f"{row['times']:.2f}",
            f"{ratio:.2f}" if step else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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
