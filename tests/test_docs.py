"""The documentation builds without a warning, and its notebook runs from top to bottom."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jinfercept
from jinfercept.llm import LLM

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def test_the_checks_of_a_change_build_the_documentation() -> None:
    assert "tools/docs" in (ROOT / ".ci" / "run").read_text()
    assert "sphinx -W " in (ROOT / "tools" / "docs").read_text()


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("furo", reason="the documentation's packages are not installed")
    from sphinx.cmd.build import main as build

    monkeypatch.setenv("COLUMNS", "80")  # the build sets its own
    monkeypatch.setattr(sys, "path", [*sys.path])
    trees, html = str(tmp_path / "trees"), str(tmp_path / "html")
    status = build(["-W", "--keep-going", "-q", "-b", "html", "-d", trees, str(ROOT / "docs"), html])
    assert status == 0, capsys.readouterr().err
    reference = (tmp_path / "html" / "api.html").read_text()
    assert all(f"jinfercept.{name}" in reference for name in ("llm.LLM.generate", "calls.Tool"))
    commands = (tmp_path / "html" / "commands.html").read_text()
    assert all(f"usage: jinfercept {name} " in commands for name in ("serve", "simulate"))
    assert "usage: python -m studies paper " in commands


def notebook_cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_the_cells_of_the_notebook_run_from_top_to_bottom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jinfercept, "LLM", partial(LLM, lazy=True, profile="paper-gptj-6b-a100"))
    names: dict[str, Any] = {}
    for cell in notebook_cells():
        assert not cell.get("outputs"), "outputs do not belong into the repository"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    check_shown(capsys.readouterr().out)


def check_shown(shown: str) -> None:
    assert "Paris" in shown
    assert "copy_ahead" in shown


@pytest.mark.slow
def test_the_notebook_runs_in_jupyter() -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    done = nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": ROOT}})
    done.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    check_shown("".join(output.get("text", "") for output in outputs if output.output_type == "stream"))
