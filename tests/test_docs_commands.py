"""What the documentation shows is done as it stands there: by a scripted model, and its servers once by a real one."""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from jinfercept.cli.main import main
from jinfercept.llm import LLM
from jinfercept.parsers.formats import ALIASES, FORMATS
from tests.support.chat_templates import QWEN
from tests.support.docs_blocks import DOCS, blocks_of
from tests.support.docs_reader import Reader, commands_in
from tests.support.live_server import until
from tests.support.scripted_model import Make

PAGES = ("start.md", "serving.md", "messages.md", "state.md", "tools.md", "metrics.md", "migration.md")
FLAG = re.compile(r"`(--[a-z-]+)")
SERVERS = {
    line: block
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "bash" and block.not_run is None and block.only_scripted is None
    for line in commands_in(block.code)
    if line.startswith("jinfercept serve")
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(
    page: str, make_scripted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scripted = make_scripted(QWEN)
    with Reader(scripted.llm, scripted, tmp_path) as reader:
        for block in blocks_of(page):
            reader.read(block)
        if reader.served is not None:
            reader.served.wait_idle()


@pytest.mark.slow
def test_other_clients_take_two_lines(make_scripted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of("migration.md")
    missing = [block.package for block in blocks if block.package and importlib.util.find_spec(block.package) is None]
    scripted = make_scripted(QWEN)
    with Reader(scripted.llm, scripted, tmp_path, packages=True) as reader:
        for block in blocks:
            if block.package not in missing:
                reader.read(block)
    if missing:
        pytest.skip(f"{', '.join(map(str, missing))} not installed")


def test_every_flag_that_a_page_names_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]*?) ?\|", (DOCS / "migration.md").read_text(), re.MULTILINE)
    assert len(rows) > 25
    named = {flag for theirs, ours in rows for flag in FLAG.findall(theirs if ours == "the same" else ours)}
    text = "".join((DOCS / page).read_text() for page in ("serving.md", "tools.md", "metrics.md"))
    assert named | set(FLAG.findall(text)) <= flags


@pytest.mark.slow
@pytest.mark.parametrize("page", ["serving.md", "metrics.md"])
def test_a_page_works_with_a_real_model(
    page: str, smollm2: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Reader(smollm2, None, tmp_path) as reader:
        for block in blocks_of(page):
            reader.read(block)
        assert reader.served is not None
        reader.served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("line", SERVERS)
def test_the_command_serves_a_real_model(line: str, tmp_path: Path) -> None:
    for block in blocks_of(SERVERS[line].place.partition(":")[0]):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.code)
    small = (
        "--port 0 --host 127.0.0.1 --kv-tokens 1024 --max-model-len 512 --max-num-seqs 2 --max-num-batched-tokens 32"
    )
    command = [sys.executable, "-m", "jinfercept", *shlex.split(line, comments=True)[1:], *small.split()]
    env = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as process:
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
    [ours] = [block.code for block in blocks_of("start.md") if block.language == "python"]
    theirs, *_ = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)
    assert ours == re.sub(r"  # .*", "", theirs)


def test_every_page_of_the_documentation_is_in_its_contents() -> None:
    contents = (DOCS / "index.md").read_text()
    assert [
        page.stem for page in DOCS.glob("*.md") if page.stem != "index" and f"\n{page.stem}\n" not in contents
    ] == []


def test_every_format_of_calls_is_told_of() -> None:
    told = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", (DOCS / "tools.md").read_text(), re.MULTILINE)))
    assert {*FORMATS, *ALIASES} <= set(told)
