"""The documentation and the README name what is there; the documentation builds, and its notebook runs."""

import ast
import functools
import json
import re
import sys
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import jinfercept
from benchmarks.__main__ import main as run_benchmark
from jinfercept.cli.main import main as run_command
from jinfercept.llm import LLM
from studies.__main__ import COMMANDS as STUDIES
from studies.__main__ import main as run_study

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "commands")
PROGRAMS = {"jinfercept": run_command, "python -m benchmarks": run_benchmark, "python -m studies": run_study}
COMMANDS = sorted(
    (program, command)
    for program in PROGRAMS
    for command in {*re.findall(rf"`{program} ([a-z][^`|]*)`", SHOWN)}
    if "--help" not in command
)


@functools.cache
def help_of(program: str, name: str) -> str:
    with redirect_stdout(StringIO()) as shown, pytest.raises(SystemExit) as ended:
        PROGRAMS[program]([name, "--help-all"])
    assert ended.value.code == 0
    return shown.getvalue()


@pytest.mark.slow
def test_the_example_runs_and_the_model_reads_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(example, {})
    shown = capsys.readouterr().out
    assert "<<price lamp=23>>" in shown
    assert "ContextUse(" in shown


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_every_command_is_one_and_has_its_flags(program: str, command: str) -> None:
    words = command.split()
    shown = help_of(program, words[0])
    assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown] == []


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.split()) <= 900
    cells = [cell for line in README.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert max(len(cell.split()) for cell in cells) <= 25
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_study_that_is_named_is_one() -> None:
    pages = [README, *(page.read_text() for page in (Path(__file__).parent.parent / "docs").glob("*.md"))]
    named = {name for page in pages for name in re.findall(r"python -m studies ([a-z_]+)", page)}
    assert {"paper", "calls", "overflow"} < named <= STUDIES.keys()


def test_every_script_that_is_named_is_there() -> None:
    named = re.findall(r"\bpython (?:-m )?([a-z_]+[./][\w./]+)", SHOWN)
    paths = {name if name.endswith(".py") else name.replace(".", "/") for name in named}
    paths |= set(re.findall(r"`(tools/\w+|(?:benchmarks|examples|deploy)/[\w./-]+)`", SHOWN))
    assert len(paths) > 20
    places = {path: (ROOT / path, ROOT / f"{path}.py") for path in paths}
    assert [path for path, names in places.items() if not any(place.exists() for place in names)] == []


def test_every_file_that_is_named_is_there() -> None:
    root = Path(__file__).parent.parent
    named = set(re.findall(r"`([a-z_/]+\.py)`", README + (root / "docs" / "rooms.md").read_text()))
    places = (root, root / "jinfercept")
    assert len(named) > 20
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_test_that_the_security_page_names_exists() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "SECURITY.md").read_text())
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (root / path).read_text()]
    assert not missing


PACKAGE = Path(__file__).parents[1] / "jinfercept"
RETIRED = {
    "ChosenTools": "MessagesToolChoice, ResponseToolChoice",
    "Counters": "SchedulerCounters",
    "Counts": "EngineCounts",
    "Endpoints": "CallDispatcher",
    "Observers": "RequestLog",
    "Page": "PageExtent",
    "PageStore": "ExtentStore",
    "RunTotals": "MeanRun",
    "Stored": "StoredWeight, PackedNumbers",
}


def test_a_class_name_means_one_thing_and_retired_names_do_not_come_back() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in names.items() if number > 1} == set()
    assert RETIRED.keys() & names.keys() == set()


NOTEBOOK = ROOT / "examples" / "tour.ipynb"


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
