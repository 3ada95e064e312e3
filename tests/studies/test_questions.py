"""`python -m studies questions`: quick answers, files, and options that are refused."""

from pathlib import Path

import pytest
from rich.console import Console

from studies.__main__ import main
from studies.answer import StudyEffort
from studies.questions.deciding import contenders
from studies.questions.registry import QUESTIONS

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
