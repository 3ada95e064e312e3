"""Sweeps: combinations in processes, failures as rows, how seeds are ranked, and what `jinfercept simulate` says and writes."""

import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jinfercept.cli.main import main
from jinfercept.cli.simulate import drawer, load
from jinfercept.cli.simulation_table import exit_status, table
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.reports import paired_ratio, ranking
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import INTERRUPTED, SimulatedLoad, SweepRun, sweep
from jinfercept.sim.workload import Arrival, Script, Segment

GPTJ = PROFILES["paper-gptj-6b-a100"]


def a_run(policy: str = "copy_ahead", rate: float = 2.0, seed: int = 0, duration: float = 4.0) -> SweepRun:
    arrivals = load("math", drawer(None, "math", 4096), rate, duration, seed)
    return SweepRun(Simulation(GPTJ, policy, duration_s=duration), arrivals)


def impossible() -> SweepRun:
    """A run that cannot be: a prompt longer than any sequence."""
    script = Script("math", 100_000, (Segment(1, None, 0),))
    return SweepRun(
        Simulation(GPTJ, "copy_ahead", duration_s=4.0), SimulatedLoad("math", 1.0, 0, [Arrival(0.0, script)])
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


def without_wall(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "sim_wall_s"}


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_two_processes_report_what_one_would_and_a_run_that_fails_is_a_row() -> None:
    runs = [a_run("copy_ahead"), impossible(), a_run("discard", rate=3.0), a_run("swap", seed=1)]
    console = quiet()
    reports = sweep(runs, jobs=2, console=console)
    assert [(report["policy"], report["rate"], report["seed"]) for report in reports] == [
        ("copy_ahead", 2.0, 0),
        ("copy_ahead", 1.0, 0),
        ("discard", 3.0, 0),
        ("swap", 2.0, 1),
    ]
    failed = reports.pop(1)
    alone = [run.play() for run in (runs[0], *runs[2:])]
    assert [without_wall(report) for report in reports] == [without_wall(report) for report in alone]
    assert "4 of 4: " in text(console)
    assert exit_status([failed, *reports]) == 1
    shown = io.StringIO()
    Console(file=shown, width=400).print(table([failed, *reports]))
    assert failed["error"][:30] in shown.getvalue()


@pytest.mark.usefixtures("interruptible")
def test_interrupting_a_sweep_ends_its_processes_and_keeps_what_is_done() -> None:
    long = a_run(rate=30.0, duration=100.0)
    console = quiet()

    def interrupt() -> None:
        while "1 of 2" not in text(console):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    interrupted, done = sweep([long, a_run()], jobs=2, console=console)
    thread.join()
    assert interrupted["error"] == INTERRUPTED
    assert done["requests"] > 0
    assert exit_status([interrupted, done]) == 130


def test_simulate_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    flags = ["--json", str(file), "--jobs", "1"]
    assert (
        main(["simulate", "--workload", "math", "--duration", "3", "--policy", "lru,swap", "--seed", "0,1", *flags])
        == 0
    )
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert set(lines[0].split()) - {"rate", "policy"} <= set(shown.err.replace(",", "").split()), (
        "the legend is complete"
    )
    assert [line.split()[:2] for line in lines] == [["rate", "policy"], ["3.5", "lru"], ["3.5", "swap"]]
    assert "–" in lines[1]  # the range over two seeds
    reports = json.loads(file.read_text())
    assert "slowness" in reports[0]
    assert [(report["policy"], report["seed"]) for report in reports] == [
        ("lru", 0),
        ("swap", 0),
        ("lru", 1),
        ("swap", 1),
    ]


def test_the_decisions_of_a_run_are_lines_that_add_up_to_its_report_and_change_nothing(tmp_path: Path) -> None:
    out, decisions = tmp_path / "out.json", tmp_path / "decisions.jsonl"
    flags = ["--duration", "5", "--kv-tokens", "6144", "--policy", "min_waste", "--json", str(out)]
    assert main(["simulate", *flags]) == 0
    [plain] = json.loads(out.read_text())
    assert main(["simulate", *flags, "--decisions", str(decisions)]) == 0
    [report] = json.loads(out.read_text())
    assert without_wall(report) == without_wall(plain)
    lines = [json.loads(line) for line in decisions.read_text().splitlines()]
    assert sum(line["copied_tokens"] for line in lines) == report["copied_out_tokens"] > 0
    assert {"at_s", "request_id", "tool", "state", "action", "why", "freed_pages"} < lines[0].keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "lru,nobody"], "no such policy; got nobody"),
        (["--estimator", "guess"], "no such estimator; got guess"),
        (["--profile", "abacus"], "no such profile; got abacus"),
        (["--workload", "poetry"], "no such kind of request; got 'poetry'; fix: mixed, or one of math"),
        (["--trace", "no/such.jsonl"], "the trace cannot be read"),
        (["--rate", "2,0"], "rate of arrivals is out of range; got 0.0"),
        (["--overload", "queue"], "--overload queue needs a trace of sessions; got --workload mixed"),
        (["--rate", "fast"], "--rate is not a number; got fast"),
        (["--seed", "0.5"], "--seed is not a number; got 0.5"),
        (["--duration", "0"], "duration_s of arrivals is out of range; got 0.0"),
        (["--kv-tokens", "100"], "the KV pool is too small for the longest sequence"),
        (["--host-tokens", "-1"], "--host-tokens is too small; got -1"),
        (["--page-size", "0"], "--page-size is too small; got 0"),
        (["--max-num-seqs", "0"], "--max-num-seqs is too small; got 0"),
        (["--jobs", "0"], "--jobs is too small; got 0"),
        (["--decisions", "no/such/folder/x"], "--decisions cannot be written"),
        (["--policy", "nobody"], "copy_ahead, bound, free_pause"),
        (["--json", "out", "--decisions", "./out"], "--decisions and --json name the same file"),
        (["--json", "/proc/x.json"], "--json cannot be written; got /proc/x.json"),
        (["--decisions", "x.jsonl", "--rate", "1,2"], "--decisions is of one run; got 2 runs"),
        (["--rate", "1e9"], "too many requests would arrive; got 1e+09 requests/s for 1200 s"),
        (["--trace", "agents", "--live", "1", "--duration", "inf"], "--duration is infinite; got inf"),
        (["--duration", "1e300"], "too many requests would arrive"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "fix:" in error


def test_a_trace_with_a_request_too_long_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"kind": "chat", "prompt": 5000, "segments": [{"decode": 1}]}\n')
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "too long; got 5001" in capsys.readouterr().err


def test_what_the_seeds_cannot_tell_apart_is_said() -> None:
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 1.1, 1: 1.9, 2: 3.2}, "c": {0: 2.0, 1: 4.1, 2: 5.9}}
    lines = ranking(values)
    assert [line.split(":")[0] for line in lines] == ["a", "b", "c"]
    assert ["not to be told apart" in line for line in lines] == [False, True, False]
    assert ranking(values, larger=True)[0].startswith("c: 4")
    assert "too few seeds" in ranking({"a": {0: 1.0}, "b": {0: 2.0}})[1]
    assert paired_ratio([(1.0, 1.0)]) is None


def trace(folder: Path) -> str:
    calls = [[1000 + 60 * turn, 20, 940 + 60 * turn if turn else 0, 1.0, 0, "tool_use", "bash"] for turn in range(16)]
    path = folder / "sessions.jsonl"
    path.write_text("".join(f"{json.dumps({'id': f's{number}', 'calls': calls})}\n" for number in range(3)))
    return str(path)


def test_a_warm_up_as_long_as_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--duration", "20", "--warm-up", "30"]) == 2
    assert "nothing that arrives would count; got --warm-up 30, --duration 20" in capsys.readouterr().err


def test_simulate_ranks_policies_by_turn_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--trace", trace(tmp_path), "--live", "4", "--kv-tokens", "3000", "--duration", "8"]
    assert main([*arguments, "--policy", "lru_host,lru", "--seed", "0,1", "--jobs", "1"]) == 0
    ranked = capsys.readouterr().out.split("mean turn delay in s, the least first")[1]
    assert "×" in ranked
