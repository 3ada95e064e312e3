"""`python -m studies calls`: its tables and files, in virtual time and in real time."""

import csv
import json
from pathlib import Path

import pytest

from jinfercept.sched.named_profiles import PROFILES
from studies.__main__ import main
from studies.calls import in_real_time as calls_in_real_time
from studies.calls.alone import LONGEST_FIRST, AloneCell, at_token_s, excess, play_cell
from studies.calls.in_real_time import measure_calls
from studies.calls.load import CALL_MODES, call_loads
from studies.calls.markup import scripted_tokenizer
from studies.calls.real import real_table
from studies.calls.scripts import CallMix
from tests.support.tiny_model import tiny_llm

SMALL = ["calls", "--quick", "--jobs", "1", "--policy", "swap,copy_ahead", "--duration", "0.8"]


def test_the_command_prints_tables_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.calls.command.QUICK_CALLS", (1, 4))
    files = {name: tmp_path / f"calls.{name}" for name in ("json", "csv", "markdown")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    picture = tmp_path / "calls.svg"
    assert main([*SMALL, *flags, "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    assert "heavy-tailed" in shown.out
    assert "steps; this reading took at most" in shown.out
    report = json.loads(files["json"].read_text())
    assert {row["speedup"]["async"] >= row["speedup"]["parallel"] - 1e-9 for row in report["requests"]} == {True}
    assert [(load["workload"], load["policy"]) for load in report["loads"]] == [
        (mode, policy) for mode in CALL_MODES for policy in ("swap", "copy_ahead")
    ]
    assert all("error" not in load for load in report["loads"])
    with files["csv"].open() as file:
        assert len(list(csv.DictReader(file))) == len(report["requests"]) + len(report["loads"])
    assert files["markdown"].read_text().count("\n|---:") == 2
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "smollm2-135m"], "--model is for --real"),
        (["--real", "--plot", "a.png"], "--real has a table alone"),
        (["--estimator", "oracle"], "no such estimator"),
        (["--token-ms", "0"], "--token-ms is too small"),
        (["--kv-tokens", "100"], "--kv-tokens is too small"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calls", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_cell_has_every_speed_up_and_a_faster_machine_gains_more() -> None:
    machine = PROFILES["paper-gptj-6b-a100"]
    rows = [play_cell(AloneCell(CallMix(4, 0.25), at_token_s(machine, token_s), 2, 0)) for token_s in (0.002, 0.02)]
    assert [row["token_ms"] for row in rows] == [2.0, 20.0]
    for row in rows:
        parallel, ours, best = (row["speedup"][way] for way in ("parallel", "async", LONGEST_FIRST))
        assert 1 < parallel <= ours <= best < 1 + row["work"]
    assert rows[0]["speedup"]["async"] > rows[1]["speedup"]["async"]
    least, most, _ = excess(rows)
    assert least == pytest.approx(0.0, abs=1e-6)
    assert most == pytest.approx(0.0, abs=1e-6)


def test_loads_have_the_same_work_in_every_mode() -> None:
    loads = call_loads([3.0], 5.0, seed=1)
    assert [load.workload for load in loads] == ["sync", "parallel", "async"]
    first, *others = [
        [arrival._replace(script=arrival.script._replace(calls="async")) for arrival in load.arrivals] for load in loads
    ]
    assert first == others[0] == others[1]
    assert len(first) > 5


@pytest.mark.slow
def test_a_request_in_real_time_reads_every_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are not compared here: `python -m studies calls --real` shows them."""
    mix = CallMix(2, 0.2, 2, decode=(24, 26), returned=(2, 3))
    monkeypatch.setattr(calls_in_real_time, "MIXES", {"two": mix})
    with tiny_llm(
        tokenizer=scripted_tokenizer(),
        kv_tokens=400,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        lazy=False,
    ) as llm:
        measurements = measure_calls(llm, 0, ["two"], 1, lambda: None)
        interceptions = llm.counters.interceptions
    assert [measurement.calls for measurement in measurements] == list(CALL_MODES)
    assert interceptions >= 2 * len(CALL_MODES)
    for measurement in measurements:
        assert measurement.formula_s > measurement.writing_s > 0
        assert measurement.latency_s > 0
    assert [row[1] for row in real_table(measurements).rows] == list(CALL_MODES)
