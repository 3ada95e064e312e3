"""`tools/gpu_suite` and `tools/tpu_suite`: parts one after another, each in a process and for a limited time, into few files.

`results.json` is written anew after every row, so that nothing is lost when the machine goes away. A part that fails or takes
too long keeps the rows it has, with what went wrong; the others go on. After every part `autotune.tar` and `cache-1.tar`, …
hold what the next run takes along, see `kept`. Imports no JAX: the device belongs to the parts.

    python -m benchmarks.suite.suite gpu|tpu --out FOLDER …
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.suite.kept import choices_flag, keep_choices, pack, unpack
from benchmarks.suite.kind import SuiteKind, describe
from benchmarks.suite.kinds import KINDS
from benchmarks.suite.parts import PROJECT
from benchmarks.suite.sizes import Row
from jinfercept.errors import ConfigError, JinferceptError
from jinfercept.models.embedded import cache_directory
from jinfercept.sim.reports import check_writable

VERSION = 1
RESULTS = "results.json"
SKIPPED = "skipped"
"""How a part ends whose packages are not here."""
ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""Of the parts, where the caller has not set it."""

MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99")
CHECKER_MARK = "========="
CHECKER_LINES = 60
"""Of the memory checker's last words, which are kept: its summary comes at the end."""

LOG_CHARACTERS = 4000
SHOWN_CHARACTERS = 240
"""Of a row on standard error, which may be all that comes back."""


def main(kind: SuiteKind, argv: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, 1 if a part failed or was cut off, 2 for a user's mistake."""
    options = _options(kind, argv)
    try:
        _check(kind, options)
    except JinferceptError as error:
        print(f"{kind.tool}: {error}", file=sys.stderr)
        return 2
    parts = [name for word in options.parts or kind.jobs for name in kind.jobs.get(word, [word])]
    limits_s = [kind.parts[name].limit_s for name in parts]
    budget_s = options.limit_s if options.tiny else min(options.limit_s, sum(limits_s))  # tiny: on any machine
    since_s, cache = time.time(), _cache(kind)
    report = {
        "version": VERSION,
        "suite": kind.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tiny": options.tiny,
        "kept": unpack(options.kept or PROJECT / "build" / f"{kind.name}-kept", cache),
        "machine": describe(kind, options.commit),
        "parts": {},
    }

    def save() -> None:
        _write(options.out / RESULTS, report)

    began_s, summaries = time.monotonic(), list[str]()
    for number, name in enumerate(parts):
        left_s = budget_s - (time.monotonic() - began_s)
        results = report["parts"][name] = {"status": "not run", "rows": []}
        save()
        if lacking := kind.parts[name].lacking:
            results |= {"status": SKIPPED, "seconds": 0.0, "error": f"there is no {', no '.join(lacking)}"}
            summaries.append(_summary(name, results))
        elif left_s > 0:
            own_s = min(left_s, limits_s[number])
            limit_s = left_s if options.tiny else max(own_s, left_s - sum(limits_s[number + 1 :]))
            _run(kind, name, options.tiny, limit_s, results, save)
            keep_choices(cache, name)
            pack(cache, since_s, options.out, tunes=kind.tunes)
            summaries.append(_summary(name, results))
        save()
    print("\n".join(summaries), file=sys.stderr)
    took_s = time.monotonic() - began_s
    print(f"written to {options.out} after {took_s:.0f} s: python -m benchmarks gpu-report {options.out / RESULTS}")
    return int(any(results["status"] not in ("done", SKIPPED) for results in report["parts"].values()))


def _options(kind: SuiteKind, argv: Sequence[str]) -> argparse.Namespace:
    description = f"Measure kernels, steps, transfers and policies on this machine's {kind.device}."
    parser = argparse.ArgumentParser(prog=kind.tool, description=description)
    jobs = "; ".join(f"{name}: {', '.join(job)}" for name, job in kind.jobs.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"a job or a part of it ({jobs}); default: all")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write; {RESULTS} must not be there yet")
    parser.add_argument(
        "--kept",
        type=Path,
        help=f"folder with the .tar files of an earlier run, or of none (default: build/{kind.name}-kept if it is there)",
    )
    seconds = f"seconds for all parts together (default: {kind.limit_s:.0f})"
    parser.add_argument("--limit-s", type=float, default=kind.limit_s, help=seconds)
    parser.add_argument("--tiny", action="store_true", help=f"tiny shapes, to prove the suite without a {kind.device}")
    parser.add_argument("--commit", help="the commit that runs, where the tree is no checkout")
    return parser.parse_args(argv)


def _check(kind: SuiteKind, options: argparse.Namespace) -> None:
    names = {**kind.jobs, **kind.parts}
    if unknown := [name for name in options.parts if name not in names]:
        raise ConfigError("no such part", got=", ".join(unknown), fix=f"choose from {', '.join(names)}")
    if options.kept is not None and not options.kept.is_dir():
        raise ConfigError(
            "--kept is no folder", got=options.kept, fix="the folder that an earlier run has left, or none"
        )
    if not options.limit_s > 0:
        raise ConfigError("--limit-s is too small", got=options.limit_s, fix="a number above 0")
    with suppress(OSError):  # which `check_writable` explains
        options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / RESULTS
    check_writable(results, "--out")
    if results.exists():
        raise ConfigError("--out has results already", got=results, fix="name a new folder; gpu-report takes several")


def _run(
    kind: SuiteKind, name: str, tiny: bool, limit_s: float, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """Run a part and note its rows, its seconds and how it ended."""
    began_s = time.monotonic()
    results |= {"clocks": {"before": kind.state()}, "status": "running"}
    program = [sys.executable, "-m", "benchmarks.suite.child", kind.name, name]
    command = [*_checker(kind, name), *program, *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(kind, name, tiny), process_group=0
        )
        late = threading.Event()
        timer = threading.Timer(limit_s, lambda: (late.set(), _end(process)))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                results["seconds"] = time.monotonic() - began_s
                _note(results, line)
                save()
                print(f"{name}: {line.rstrip()[:SHOWN_CHARACTERS]}", file=sys.stderr, flush=True)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
            process.wait()
        results["seconds"] = time.monotonic() - began_s
        results["clocks"]["after"] = kind.state()
        results["status"] = "cut off" if late.is_set() else "done" if status == 0 else "failed"
        if status and "error" not in results:
            log.seek(0)
            how = f"ended after {limit_s:.0f} s" if late.is_set() else f"exit status {status}"
            results["error"] = f"{how}: {log.read()[-LOG_CHARACTERS:]}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a part's process and those that it started: under the memory checker the part is one of them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _checker(kind: SuiteKind, name: str) -> Sequence[str]:
    """What a part's command begins with: the memory checker, for a part that wants it and where there is one."""
    return MEMCHECK if kind.parts[name].checked and shutil.which(MEMCHECK[0]) else ()


def environment(kind: SuiteKind, name: str, tiny: bool) -> dict[str, str]:
    """A part's variables. The CPU stands beside the device as the reference of `correctness`."""
    part, cache, platforms = kind.parts[name], _cache(kind), os.environ.get("JAX_PLATFORMS", "")
    if "cpu" not in platforms.split(","):
        platforms = "cpu" if tiny else f"{kind.platform},cpu"
    flags = [os.environ.get("XLA_FLAGS", ""), *part.xla_flags, choices_flag(cache) if kind.tunes else ""]
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache), **ENVIRONMENT, **os.environ, **part.environment}
    variables |= {"JAX_PLATFORMS": platforms, "XLA_FLAGS": " ".join(filter(None, flags))}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:  # the same by another name; jaxlib refuses to see both
        variables.pop("XLA_CLIENT_MEM_FRACTION", None)
    return variables


def _cache(kind: SuiteKind) -> Path:
    """The compilation cache of the parts."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_directory() / f"{kind.name}-suite")


def _note(results: dict[str, Any], line: str) -> None:
    """A line of a part: a row, its device, its error, or the memory checker's; a line that a kill has cut is nothing."""
    if line.startswith(CHECKER_MARK):
        results["checker"] = [*results.get("checker", ()), line.removeprefix(CHECKER_MARK).rstrip()][-CHECKER_LINES:]
        return
    try:
        row: Row = json.loads(line)
    except ValueError:
        return
    if row.keys() in ({"error"}, {"device"}):
        results |= row
    else:
        results["rows"].append(row | {"at_s": round(results["seconds"], 1)})


def _summary(name: str, results: Mapping[str, Any]) -> str:
    error = f": {results['error'].strip().splitlines()[-1]}" if "error" in results else ""
    return f"{name}: {results['status']}, {len(results['rows'])} rows in {results['seconds']:.0f} s{error}"


def _write(path: Path, report: Mapping[str, Any]) -> None:
    """The whole file or the last one, never half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(KINDS[sys.argv[1]], sys.argv[2:]))
