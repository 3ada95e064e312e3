"""Where deciding matters: crowds of clients, a quick answer with its files, policies of the user's own, and mistakes."""

from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from studies.__main__ import main
from studies.answer import StudyEffort
from studies.deciding.crowd import MOST_CONTEXT, Crowd
from studies.deciding.report import contenders

EXAMPLES = Path(__file__).parents[2] / "examples"
DURATION_S = 400.0


@pytest.mark.parametrize("returning", [1.0, 0.3])
def test_as_many_clients_return_as_asked_for(returning: float) -> None:
    crowd = Crowd(1000.0, returning, 0.0)
    scripts = [script for _, script in crowd.load(DURATION_S, 0).arrivals]
    leave = [max(segment.call_s or 0.0 for segment in script.segments) > 2 * DURATION_S for script in scripts]
    assert fmean(leave) == pytest.approx(1 - returning, abs=0.03)
    assert all(script.context <= MOST_CONTEXT for script in scripts)
    assert all(
        script.segments[-2].call_s == 4 * DURATION_S for script, left in zip(scripts, leave, strict=True) if left
    )


def test_a_crowd_that_leaves_asks_for_as_many_tokens_per_second() -> None:
    for returning in (1.0, 0.3):
        load = Crowd(500.0, returning, 0.0).load(DURATION_S, 0)
        tokens_per_s = sum(script.generated for _, script in load.arrivals) / DURATION_S
        assert tokens_per_s == pytest.approx(500.0, rel=0.1)


def test_the_same_seed_is_the_same_crowd_and_another_spread_the_same_lengths() -> None:
    first, again, other = (Crowd(300.0, 0.7, spread).load(30.0, 5).arrivals for spread in (1.0, 1.0, 2.0))
    assert first == again
    assert [script.prompt for _, script in first] == [script.prompt for _, script in other]


@pytest.mark.slow
def test_a_quick_answer_has_a_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deciding", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "written: " in capsys.readouterr().out
    page = (tmp_path / "deciding.md").read_text(encoding="utf-8")
    assert page.startswith("## ")
    assert "|---:|" in page
    assert (tmp_path / "deciding.png").stat().st_size > 10_000
    assert len((tmp_path / "deciding.csv").read_text().splitlines()) > 1


def test_a_policy_of_the_users_own_is_compared_too() -> None:
    place = f"{EXAMPLES / 'own_policy.py'}:LastBackFirst"
    names = [contender.name for contender in contenders(StudyEffort(True, 1, 0, Console(), (place, "swap")))]
    assert names == ["copy_ahead", "lru_host", "copy_ahead, MemoryTime", "LastBackFirst", "swap"]
