"""What the README shows works as it stands there."""

import functools
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from jinfercept.cli.main import main
from studies.__main__ import COMMANDS as STUDIES
from studies.questions.registry import QUESTIONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
COMMANDS = sorted({command for command in re.findall(r"`jinfercept ([^`|]+)`", SHOWN) if "--help" not in command})


@functools.cache
def help_of(*name: str) -> str:
    with redirect_stdout(StringIO()) as shown, pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert ended.value.code == 0
    return shown.getvalue()


@pytest.mark.slow
def test_the_example_runs_and_the_model_reads_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(example, {})
    shown = capsys.readouterr().out
    assert "<<price lamp=23>>" in shown
    assert "ContextUse(" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_and_has_its_flags(command: str) -> None:
    words = command.split()
    shown = help_of(words[0])
    assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown] == []


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 120
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_study_that_is_named_is_one() -> None:
    pages = [README, *(page.read_text() for page in (Path(__file__).parent.parent / "docs").glob("*.md"))]
    named = {name for page in pages for name in re.findall(r"python -m studies ([a-z_]+)", page)}
    assert {"paper", "calls", "overflow"} < named <= {*STUDIES, *QUESTIONS}


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
