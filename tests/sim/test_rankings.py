"""How the answers of several seeds are compared, and `simulate` ranks by them."""

import json
from pathlib import Path

import pytest

from jinfercept.cli.main import main
from jinfercept.sim.reports import paired_ratio, ranking


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
