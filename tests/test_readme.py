"""What the README shows works as it stands there."""

import functools
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.__main__ import main as run_benchmark
from jinfercept.cli.main import main as run_command
from studies.__main__ import COMMANDS as STUDIES
from studies.__main__ import main as run_study
from studies.questions.registry import QUESTIONS

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
    assert {"paper", "calls", "overflow"} < named <= {*STUDIES, *QUESTIONS}


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
    places = (root, root / "jinfercept", root / "jinfercept" / "intercept")
    assert len(named) > 20
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_test_that_the_security_page_names_exists() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "SECURITY.md").read_text())
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (root / path).read_text()]
    assert not missing
