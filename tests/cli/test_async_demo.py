"""`jinfercept demo --async`: lanes show when calls run, and both ways of calling end in the same answers."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from jinfercept.cli import async_demo
from jinfercept.cli.main import main
from jinfercept.events import Intercepted, Resumed, Token


def test_lanes_show_when_the_model_waits_and_when_a_call_runs() -> None:
    lanes = async_demo.Lanes(began_s=0.0, ended_s=6.0)
    lanes.note(Token("r", 1, "one\ntwo"))
    lanes.note(Intercepted("r", ()))
    lanes.note(Resumed("r", (), (2,), "[INTR]"))
    lanes.waits, lanes.calls["f()"] = [async_demo.Span(2.0, 4.0)], async_demo.Span(1.0, 4.0)
    file = StringIO()
    Console(width=100, file=file).print(async_demo._picture({"async": lanes}, full_s=12.0))
    shown = [line.rstrip() for line in file.getvalue().splitlines()]
    assert shown[1:4] == ["asynchronous calls  6.0 s", "one", "two[INTR]"]
    assert shown[4].split() == ["model", "█" * 8 + "░" * 8 + "█" * 8]
    assert shown[5].split() == ["f()", "━" * 12, "…"]


def test_without_its_model_the_demo_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(async_demo, "CHECKPOINTS", (tmp_path / "none",))
    assert main(["demo", "--async"]) == 2
    assert "python -m examples.async_calls train DIR" in capsys.readouterr().err
    assert main(["demo", "--model", "m"]) == 2
    assert "--model belongs to --async" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_that_ships_answers_alike_whether_its_calls_wait_or_not() -> None:
    assert main(["demo", "--async"]) == 0
