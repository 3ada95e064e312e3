"""`jinfercept demo --async`: lanes show when calls run, and both ways of calling end in the same answers."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.async_calls import demo
from jinfercept.cli import demo as cli
from jinfercept.cli.main import main
from jinfercept.events import Intercepted, Resumed, Token


def test_lanes_show_when_the_model_waits_and_when_a_call_runs() -> None:
    lanes = demo.Lanes(began_s=0.0, ended_s=6.0)
    lanes.note(Token("r", 1, "one\ntwo"))
    lanes.note(Intercepted("r", ()))
    lanes.note(Resumed("r", (), (2,), "[INTR]"))
    lanes.waits, lanes.calls["f()"] = [demo.Span(2.0, 4.0)], demo.Span(1.0, 4.0)
    file = StringIO()
    Console(width=100, file=file).print(demo._picture({"async": lanes}, full_s=12.0))
    shown = [line.rstrip() for line in file.getvalue().splitlines()]
    assert shown[1:4] == ["asynchronous calls  6.0 s", "one", "two[INTR]"]
    assert shown[4].split() == ["model", "█" * 8 + "░" * 8 + "█" * 8]
    assert shown[5].split() == ["f()", "━" * 12, "…"]


def test_outside_a_clone_the_demo_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site" / "jinfercept" / "cli" / "demo.py"))
    assert main(["demo", "--async"]) == 2
    assert "folder of a clone of the repository" in capsys.readouterr().err
    assert main(["demo", "--model", "m"]) == 2
    assert "--model is allowed only with --async" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_that_ships_answers_alike_whether_its_calls_wait_or_not() -> None:
    assert main(["demo", "--async"]) == 0
