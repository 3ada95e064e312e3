"""The studies' command and its questions: quick answers, tables of latency, files, and options that are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jinfercept.sim.run_stats import Report
from studies.__main__ import COMMANDS, main
from studies.answer import StudyEffort
from studies.questions.deciding import contenders
from studies.questions.latency_grid import LatencyGrid, good_share, latency_text
from studies.questions.registry import QUESTIONS


def report(mean: float) -> Report:
    latency = {"mean": mean, "p50": mean / 2, "p99": 10 * mean}
    return {"normalized_latency_ms_per_token": latency, "goodput_per_s": 1.5, "simulated_s": 20.0, "requests": 40}


ROWS = {"a": {"x": report(10.0), "y": report(10.1), "z": report(40.0)}, "b": {"y": report(30.0)}}
GRID = LatencyGrid("Policies", ("machine", "policy"), ("w", "x", "y", "z"), ROWS)


def test_a_cell_says_mean_median_tail_and_goodput() -> None:
    assert good_share(report(1.0)) == 0.75
    assert latency_text(report(12.345)) == "12.3 / 6.17 / 123 / 75%"


def test_the_best_of_a_row_its_ties_and_the_worst_of_a_column() -> None:
    assert GRID.ranked("a") == ["x", "y", "z"]
    assert GRID.as_good("a") == ["x", "y"]
    assert GRID.ratio("a", "z") == 4.0
    assert GRID.worst("y") == (pytest.approx(1.01), "a")
    assert GRID.worst("w") is None


def test_columns_without_a_report_are_not_shown_and_empty_cells_are() -> None:
    table, shown = GRID.table(), GRID.heat_map()
    assert list(table.columns) == ["machine", "x", "y", "z"]
    assert table.rows[1][1] == ""
    assert list(shown.rows) == ["b", "a"], "the first row of the table is on top of the map"
    assert shown.values[1] == [1.0, pytest.approx(1.01), 4.0]
    assert shown.values[0] == [None, 1.0, None]


def test_a_base_takes_the_place_of_the_best() -> None:
    shown = GRID._replace(rows={"a": ROWS["a"]}, base="z").heat_map()
    assert shown.values == [[0.25, pytest.approx(0.2525), 1.0]]


ROOT = Path(__file__).parents[2]


def test_the_overview_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in (*COMMANDS, *QUESTIONS) if name not in shown] == []


def test_every_study_explains_its_flags_without_jax() -> None:
    code = (
        "import contextlib, sys\nfrom studies.__main__ import COMMANDS, main\nfor name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '--help'])\n"
        "print({'jax', 'matplotlib', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [name for name in COMMANDS if f"usage: python -m studies {name} " not in done.stdout] == []
    assert done.stdout.endswith("set()\n")


def test_a_question_is_asked_by_its_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variety", "--jobs", "0"]) == 2
    assert "--jobs is too small" in capsys.readouterr().err


def test_a_package_that_is_missing_is_said_before_a_study_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("studies.__main__.NEEDED", ("no_such_package",))
    assert main(["variety"]) == 2
    assert "studies need no_such_package: pip install '.[studies]'" in capsys.readouterr().err
    assert main(["--help"]) == 0


EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLE = ("waste",)
"""Questions whose answers are made in every run; the others with `-m slow`."""


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in QUESTIONS]
)
def test_a_quick_answer_has_a_table_and_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["questions", name, "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "written: " in capsys.readouterr().out
    page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith("## ")
    assert "|---:|" in page
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [(["wast"], "did you mean 'waste'?"), (["waste", "--jobs", "0"], "--jobs is too small")],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["questions", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_policy_of_the_users_own_is_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{EXAMPLES / 'own_policy.py'}:LastBackFirst"
    names = [contender.name for contender in contenders(StudyEffort(True, 1, 0, Console(), (place, "swap")))]
    assert names == ["copy_ahead", "lru_host", "copy_ahead, MemoryTime", "LastBackFirst", "swap"]
    assert main(["questions", "deciding", "--quick", "--policy", "nowhere.py:Mine"]) == 2
    assert "no such file for a policy" in capsys.readouterr().err
