"""What is read from decision records: small files whose numbers can be worked out, and a run's whole account."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import draw
from studies.__main__ import main as studies
from studies.decisions.command import Decisions
from studies.decisions.summary import ALL, load_records, pinball, summary

RUN = {"type": "run", "version": 1, "policy": "lru", "quantiles": [0.5, 0.9], "ages_s": [0.0, 1.0]}


def outcome(
    tool: str, predicted: float, held_token_s: float, call_s: float | None = 2.0, **other: Any
) -> dict[str, Any]:
    return {
        "type": "outcome",
        "tools": [tool],
        "returned": True,
        "duration_s": 2.5,
        "call_s": call_s,
        "predicted_token_s": predicted,
        "actual_token_s": held_token_s + 1.0,
        "actual": {"held": held_token_s, "recompute": 1.0, "fetch": 0.0, "stall": 0.0, "queued": 3.0},
        "forecasts": [
            {"age_s": 0.0, "remaining_s": 3.0, "quantiles_s": [1.0, 4.0]},
            {"age_s": 1.5, "remaining_s": 0.5, "quantiles_s": [0.5, 0.5]},
        ],
        **other,
    }


def written(path: Path, *lines: dict[str, Any], end: str = "") -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end, encoding="utf-8")
    return str(path)


def test_waste_is_summed_and_compared_by_tool(tmp_path: Path) -> None:
    lines = (
        outcome("a", 10.0, 4.0),
        outcome("a", 0.0, 1.0),
        outcome("b", 2.0, 7.0),
        outcome("b", 1, 1, returned=False),
    )
    report = summary(load_records(written(tmp_path / "log", RUN, *lines)))
    assert report["unreturned"] == 1
    assert list(report["waste"]) == [ALL, "a", "b"]
    every, a = report["waste"][ALL], report["waste"]["a"]
    assert every["interceptions"] == 3
    assert every["of_all"] == (5 + 2 + 8) / 12
    assert every["unpredicted"] == a["unpredicted"] == 1
    assert a["ratio"] == {"p10": 0.5, "p50": 0.5, "p90": 0.5, "mean": 0.5}
    assert every["parts"] == {"held": 12.0, "recompute": 3.0, "fetch": 0.0, "stall": 0.0, "queued": 9.0}


def test_forecasts_are_compared_with_how_long_the_call_still_lasted(tmp_path: Path) -> None:
    path = written(tmp_path / "log", RUN, outcome("a", 1.0, 1.0), outcome("a", 1.0, 1.0, call_s=None))
    at_once, later = summary(load_records(path))["durations"]["a"]
    assert (at_once["age_s"], at_once["calls"], at_once["predicted_s"], at_once["actual_s"]) == (0.0, 1, 3.0, 2.0)
    assert at_once["returned"] == {"0.5": 0.0, "0.9": 1.0}
    assert at_once["pinball_s"] == pytest.approx((0.5 * 1.0 + 0.1 * 2.0) / 2)
    assert (later["age_s"], later["actual_s"], later["returned"]) == (1.0, 0.5, {"0.5": 1.0, "0.9": 1.0})


def test_a_forecast_after_the_calls_end_does_not_count(tmp_path: Path) -> None:
    [only] = summary(load_records(written(tmp_path / "log", RUN, outcome("a", 1, 1, call_s=1.0))))["durations"]["a"]
    assert only["age_s"] == 0.0


def test_decisions_are_counted_by_action_and_reason(tmp_path: Path) -> None:
    decision = {"type": "decision", "action": "copy", "why": "idle", "tokens": 5, "copied_tokens": 4}
    kept = {"type": "decision", "action": "keep", "why": "nothing was done"}
    copied, keep = summary(load_records(written(tmp_path / "log", RUN, decision, decision, kept)))["decisions"]
    assert (copied["decisions"], copied["tokens"], copied["copied_tokens"], copied["lost_tokens"]) == (2, 10, 8, 0)
    assert (keep["action"], keep["decisions"]) == ("keep", 1)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    records = load_records(written(tmp_path / "log", RUN, outcome("a", 1, 1), end='{"type": "outc'))
    assert len(records.outcomes[ALL]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not hold decisions"),
        ('{"type":"run","version":0}\n', "does not hold decisions"),
        ("{\n", "line 1: not JSON"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_records(tmp_path / "log")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_records(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predicted_token_s": "many"}, "line 3: not a record as it was written; got 'many' where a number belongs"),
        ({"actual": {}}, "line 3: not a record as it was written; got no 'held'"),
        ({"forecasts": [{"age_s": 0.0, "remaining_s": 1.0, "quantiles_s": [1.0]}]}, "1 quantiles, and 2"),
        ({"tools": 3}, "line 3: not a record"),
        ({"actual_token_s": float("inf")}, "where a finite number belongs"),
    ],
)
def test_an_edited_line_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "log", RUN, outcome("a", 1, 1), outcome("a", 1, 1) | change)
    with pytest.raises(ConfigError, match=message):
        load_records(path)


def test_a_line_that_lacks_something_or_has_no_end_of_brackets_is_named(tmp_path: Path) -> None:
    lacking = outcome("a", 1, 1)
    del lacking["returned"]
    with pytest.raises(ConfigError, match=r"line 2: not a record as it was written; got no 'returned'"):
        load_records(written(tmp_path / "lacking", RUN, lacking))
    with pytest.raises(ConfigError, match="line 1: not a record"):
        load_records(written(tmp_path / "head", RUN | {"quantiles": 3}))
    (tmp_path / "deep").write_text("[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        load_records(tmp_path / "deep")


def test_the_quantile_loss_is_least_at_the_quantile() -> None:
    actual = [float(value) for value in range(101)]
    losses = {guess: sum(pinball(0.9, float(guess), value) for value in actual) for guess in range(101)}
    assert min(losses, key=losses.__getitem__) in (90, 91)


# -- a run -------------------------------------------------------------------------------------------------------------


SIMULATION = Simulation(
    PROFILES["paper-gptj-6b-a100"],
    "min_waste",
    "history",
    duration_s=15.0,
    kv_tokens=6144,
    host_tokens=4096,
    max_model_len=2100,
)


def crowd() -> list[Arrival]:
    rng = Random(1)
    return arrivals(lambda: draw("mixed", rng), 1.5, SIMULATION.duration_s, rng)


SLOW = [pytest.param(policy, depth, marks=pytest.mark.slow) for policy, depth in (("swap", 0), ("lru_host", 1))]


@pytest.mark.parametrize(("policy", "depth"), [("copy_ahead", 0), ("min_waste", 1), *SLOW])
def test_recording_changes_nothing_and_accounts_for_what_the_run_reports(
    policy: str, depth: int, tmp_path: Path
) -> None:
    simulation, path = replace(SIMULATION, policy=policy, depth=depth), tmp_path / "log"
    plain = simulation.run(crowd())
    recorded = simulation.run(crowd(), decisions=str(path))
    assert plain | {"sim_wall_s": 0} == recorded | {"sim_wall_s": 0}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    choices = [line for line in lines if line["type"] == "decision"]
    assert sum(line["copied_tokens"] for line in choices if "copied_tokens" in line) == plain["copied_out_tokens"]
    parts = [line["actual"] for line in lines if line["type"] == "outcome"]
    waste = plain["waste_token_s"]
    stall = sum(part["stall"] for part in parts)
    assert stall <= 1.05 * waste["stall"]
    assert depth or stall >= 0.95 * waste["stall"] - 1.0
    held_token_s = sum(part["held"] + part["queued"] for part in parts)
    assert 0.95 * waste["preserve"] <= held_token_s <= 1.05 * waste["preserve"]


def test_the_command_shows_tables_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    SIMULATION.run(crowd(), decisions=str(log))
    assert studies(["decisions", str(log), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for title in ("what was done", "waste of an interception", "seconds still to come"):
        assert title in shown
    [report] = json.loads(out.read_text())
    assert report["waste"][ALL]["interceptions"] == sum(
        row["interceptions"] for tool, row in report["waste"].items() if tool != ALL
    )


def test_files_under_other_names_than_asked_are_named_and_found_by_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--workload", "math", "--duration", "2", "--policy", "lru,swap", "--jobs", "1"]
    assert main(["simulate", *flags, "--decisions", "d.jsonl"]) == 0
    shown = capsys.readouterr().err.splitlines()
    names = {line.removeprefix("written: ") for line in shown if line.startswith("written: ")}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2
    assert studies(["decisions", "d.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "d-lru-3.5-0.jsonl" in shown
    assert "d-swap-3.5-0.jsonl" in shown
    assert studies(["decisions", "e.jsonl"]) == 2


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    picture = tmp_path / "out.png"
    log = written(tmp_path / "log", RUN, outcome("a", 10.0, 4.0))
    Decisions(files=(log,), plot=str(picture)).run()
    assert picture.read_bytes().startswith(b"\x89PNG")
