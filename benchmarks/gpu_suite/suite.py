"""`tools/gpu_suite`: the parts one after another, each in its own process and for a limited time, into one JSON file.

The file is written anew after every row, so that nothing is lost when the machine goes away. A part that fails or takes too
long keeps the rows it has, with what went wrong; the others go on. Imports no JAX: the device belongs to the parts.
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

from benchmarks.gpu_suite.machine import describe, gpu_state
from benchmarks.gpu_suite.parts import JOBS, PARTS
from benchmarks.gpu_suite.sizes import Row
from jinfercept.errors import ConfigError, JinferceptError
from jinfercept.models.embedded import cache_directory
from jinfercept.sim.reports import check_writable

VERSION = 1
ENVIRONMENT = {
    "XLA_CLIENT_MEM_FRACTION": "0.92",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "48",
    "JAX_COMPILATION_CACHE_DIR": str(cache_directory() / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""Of the parts, where the caller has not set it."""

MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99")
CHECKER_MARK = "========="
CHECKER_LINES = 60
"""Of the memory checker's last words, which are kept: its summary comes at the end."""

SAID_CHARACTERS = 4000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 if a part failed or was cut off, 2 for a user's mistake."""
    options = _options(argv)
    try:
        _check(options)
    except JinferceptError as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    parts = options.parts or list(JOBS[options.job - 1] if options.job else PARTS)
    began_s = time.monotonic()
    report = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tiny": options.tiny,
        "machine": describe(options.commit),
        "parts": {},
    }
    for name in parts:
        left_s = options.limit_s - (time.monotonic() - began_s)
        found = report["parts"][name] = {"status": "not run", "rows": []}
        _write(options.out, report)
        if left_s > 0:
            _run(name, options.tiny, min(left_s, PARTS[name].limit_s), found, lambda: _write(options.out, report))
            print(_summary(name, found), file=sys.stderr, flush=True)
        _write(options.out, report)
    print(
        f"written to {options.out} after {time.monotonic() - began_s:.0f} s: python -m benchmarks gpu-report {options.out}"
    )
    return int(any(found["status"] != "done" for found in report["parts"].values()))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_suite", description="Measure kernels, steps, transfers and policies on this machine's GPU."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all, in this order)")
    jobs = "; ".join(f"{number}: {', '.join(job)}" for number, job in enumerate(JOBS, 1))
    parser.add_argument("--job", type=int, choices=range(1, len(JOBS) + 1), help=f"the parts of one job ({jobs})")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; it must not be there yet")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all parts together (default: 540)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to prove the suite where there is no GPU")
    parser.add_argument("--commit", help="the commit that runs, where the tree is no checkout")
    return parser.parse_args(argv)


def _check(options: argparse.Namespace) -> None:
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        raise ConfigError("no such part", got=", ".join(unknown), fix=f"choose from {', '.join(PARTS)}")
    if options.parts and options.job:
        raise ConfigError("--job has parts of its own", got=", ".join(options.parts), fix="name parts or a job")
    check_writable(options.out, "--out")
    if options.out.exists():
        raise ConfigError("--out is there already", got=options.out, fix="name a new file; gpu-report takes several")
    if not options.limit_s > 0:
        raise ConfigError("--limit-s is too small", got=options.limit_s, fix="seconds above 0")


def _run(name: str, tiny: bool, limit_s: float, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Run a part and note its rows, its seconds and how it ended."""
    began_s = time.monotonic()
    found |= {"clocks": {"before": gpu_state()}, "status": "running"}
    command = [*_checker(name), sys.executable, "-m", "benchmarks.gpu_suite.child", name, *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=_environment(name), process_group=0
        )
        late = threading.Event()
        timer = threading.Timer(limit_s, lambda: (late.set(), _end(process)))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _note(found, line)
                found["seconds"] = time.monotonic() - began_s
                save()
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
            process.wait()
        found["seconds"] = time.monotonic() - began_s
        found["clocks"]["after"] = gpu_state()
        found["status"] = "cut off" if late.is_set() else "done" if status == 0 else "failed"
        if status and not late.is_set() and "error" not in found:
            said.seek(0)
            found["error"] = f"exit status {status}: {said.read()[-SAID_CHARACTERS:]}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a part's process and those that it started: under the memory checker the part is one of them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _checker(name: str) -> Sequence[str]:
    """What a part's command begins with: the memory checker, for a part that wants it and where there is one."""
    return MEMCHECK if PARTS[name].checked and shutil.which(MEMCHECK[0]) else ()


def _environment(name: str) -> dict[str, str]:
    environment = {**ENVIRONMENT, **os.environ, **PARTS[name].environment}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:  # the same by another name; jaxlib refuses to see both
        del environment["XLA_CLIENT_MEM_FRACTION"]
    return environment


def _note(found: dict[str, Any], line: str) -> None:
    """A line of a part: a row, its device, its error, or the memory checker's; a line that a kill has cut is nothing."""
    if line.startswith(CHECKER_MARK):
        found["checker"] = [*found.get("checker", ()), line.removeprefix(CHECKER_MARK).rstrip()][-CHECKER_LINES:]
        return
    try:
        row: Row = json.loads(line)
    except ValueError:
        return
    if row.keys() in ({"error"}, {"device"}):
        found |= row
    else:
        found["rows"].append(row)


def _summary(name: str, found: Mapping[str, Any]) -> str:
    error = f": {found['error'].strip().splitlines()[-1]}" if "error" in found else ""
    return f"{name}: {found['status']}, {len(found['rows'])} rows in {found['seconds']:.0f} s{error}"


def _write(path: Path, report: Mapping[str, Any]) -> None:
    """The whole file or the last one, never half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
