"""What the documentation shows is done as it stands there: by a scripted model, and its servers once by a real one."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

import jinfercept
from jinfercept.chat.parsers.formats import ALIASES, FORMATS
from jinfercept.cli.main import main
from tests.support.chat_templates import QWEN
from tests.support.docs_blocks import DOCS, NEEDS, SHOWN, blocks_of
from tests.support.docs_reader import PORT, Reader, commands_in
from tests.support.live_server import until
from tests.support.scripted_model import Make

ROOT = DOCS.parent
BLOCKS = {page: blocks_of(page) for page in ("../README.md", *sorted(path.name for path in DOCS.glob("*.md")))}
PAGES = [page for page, blocks in BLOCKS.items() if any(block.language in ("python", "bash") for block in blocks)]
TRACES = ("SESSIONS.jsonl", "claude_code.jsonl", "conversation_trace.jsonl")
"""Sessions of the reader's, in place of which the tests have those that ship."""
FLAG = re.compile(r"`(--[a-z-]+)")
SERVERS = {
    line: block
    for page in PAGES
    for block in BLOCKS[page]
    if block.language == "bash" and block.not_run is None and block.only_scripted is None
    for line in commands_in(block.code)
    if line.startswith("jinfercept serve")
}


def programs() -> dict[str, str]:
    """The programs of all pages that need no server, each with those above it that it continues."""
    found: dict[str, str] = {}
    for page in PAGES:
        source = ""
        for block in BLOCKS[page]:
            if block.language == "python" and block.file is None and block.not_run is None:
                source = source + block.code if block.continues else block.code
                if PORT not in source:
                    found[block.place] = source
    return found


PROGRAMS = programs()
COMMANDS = {
    f"{block.place} {number}": (line, block.shorter)
    for blocks in BLOCKS.values()
    for block in blocks
    if block.shorter is not None
    for number, line in enumerate(commands_in(block.code))
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with all of the repository but the documentation, and what its reader has."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "build", "docs"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "docs").mkdir()
    for name in TRACES:
        (tmp_path / name).symlink_to(ROOT / "jinfercept" / "sim" / "agents.jsonl")
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, make_scripted: Make, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    scripted = make_scripted(QWEN)
    with Reader(scripted, clone) as reader:
        monkeypatch.setattr(jinfercept, "LLM", reader.open)
        for block in BLOCKS[page]:
            reader.read(block)
        if reader.served is not None:
            reader.served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("place", PROGRAMS)
def test_a_program_runs_alone(place: str, clone: Path) -> None:
    (clone / "program.py").write_text(PROGRAMS[place])
    env = {
        name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"
    }  # these compute
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_runs_with_less_to_do(place: str, clone: Path) -> None:
    line, shorter = COMMANDS[place]
    words = shlex.split(line, comments=True)
    for flag, value in re.findall(r"(--[\w-]+)(?: ([^-\"]\S*|\"[^\"]*\"))?", shorter or ""):
        at = words.index(flag) if flag in words else len(words)
        words[at : at + 2] = [flag, value.strip('"')] if value else [flag]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path}
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    assert done.stdout


def test_what_is_not_run_needs_what_no_test_has() -> None:
    left = {block.place: block.not_run for blocks in BLOCKS.values() for block in blocks if block.not_run is not None}
    assert {place: why for place, why in left.items() if why.partition(":")[0] not in NEEDS} == {}
    assert len(left) <= 35


def test_every_block_is_of_a_language_that_is_run_or_only_shown() -> None:
    languages = {block.language for blocks in BLOCKS.values() for block in blocks}
    assert languages <= {"python", "bash", *SHOWN}


def test_every_flag_that_a_page_names_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    flags = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]*?) ?\|", (DOCS / "migration.md").read_text(), re.MULTILINE)
    assert len(rows) > 25
    named = {flag for theirs, ours in rows for flag in FLAG.findall(theirs if ours == "the same" else ours)}
    text = "".join((DOCS / page).read_text() for page in ("serving.md", "tools.md", "metrics.md"))
    assert named | set(FLAG.findall(text)) <= flags


@pytest.mark.slow
@pytest.mark.parametrize("line", SERVERS)
def test_the_command_serves_a_real_model(line: str, clone: Path) -> None:
    for block in blocks_of(SERVERS[line].place.partition(":")[0]):
        if block.file is not None:
            (clone / block.file).write_text(block.code)
    small = (
        "--port 0 --host 127.0.0.1 --kv-tokens 1024 --max-model-len 512 --max-num-seqs 2 --max-num-batched-tokens 32"
    )
    command = [sys.executable, "-m", "jinfercept", *shlex.split(line, comments=True)[1:], *small.split()]
    env = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=clone, env=env) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with httpx2.Client(base_url=url) as client:
                until(lambda: _answers(client))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def _answers(client: httpx2.Client) -> bool:
    """Whether a server that listens already takes requests."""
    try:
        return client.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("command", ["info smollm2-135m", "demo --requests 2 --slow-s 0.1 --show 1"])
def test_the_first_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 0
    assert capsys.readouterr().out


def test_the_first_example_is_the_one_that_the_readme_shows() -> None:
    [ours] = [block.code for block in BLOCKS["start.md"] if block.language == "python"]
    theirs, *_ = [block.code for block in BLOCKS["../README.md"] if block.language == "python"]
    assert ours == re.sub(r"  # .*", "", theirs)


def test_every_page_of_the_documentation_is_in_its_contents() -> None:
    contents = (DOCS / "index.md").read_text()
    assert [
        page.stem for page in DOCS.glob("*.md") if page.stem != "index" and f"\n{page.stem}\n" not in contents
    ] == []


def test_every_format_of_calls_is_told_of() -> None:
    told = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", (DOCS / "tools.md").read_text(), re.MULTILINE)))
    assert {*FORMATS, *ALIASES} <= set(told)
