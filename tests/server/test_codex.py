"""OpenAI's Codex CLI on `/v1/responses`: the program itself, which runs its tools and sends their results."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfercept.server import responses
from tests.support.chat_templates import QWEN
from tests.support.live_server import END, MODEL, Running, running
from tests.support.scripted_model import Scripted, scripted_llm

PACKAGE = "@openai/codex@0.169.0"
LENGTH = 131072
"""The program's own prompt has 45,000 bytes, each of which is a token of the scripted model."""
RUN = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "printf 2; printf 3"}}\n</tool_call>'
CLOSE = '<tool_call>\n{"name": "multi_agent_v1__close_agent", "arguments": {"target": "x"}}\n</tool_call>'
TURNS = (RUN, CLOSE, "It costs 23.")
CONFIG = """\
model = "{model}"
model_provider = "jinfercept"
[model_providers.jinfercept]
name = "jinfercept"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program: the installed one, or one that npm fetches."""
    if (installed := shutil.which("codex")) is not None:
        return installed
    if (npm := shutil.which("npm")) is None:
        pytest.skip("neither codex nor npm is installed")
    folder = tmp_path_factory.mktemp("codex")
    done = subprocess.run([npm, "install", "--prefix", folder, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {PACKAGE}: {done.stderr[-200:]}")
    return str(folder / "node_modules/.bin/codex")


@pytest.fixture
def long() -> Iterator[tuple[Scripted, Running]]:
    """A server whose model has a long context."""
    with scripted_llm(LENGTH) as make:
        scripted = make(QWEN)
        with running(scripted.llm, max_prompt_chars=1_000_000) as server:
            yield scripted, server
            server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_program_runs_its_tools_over_three_turns(
    long: tuple[Scripted, Running], codex: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted, server = long
    prompts: list[str] = []
    make_response_chat = responses.make_response_chat

    def scripting(*args: Any) -> Any:
        """Writes the script, since only the program knows its prompts."""
        made = make_response_chat(*args)
        [request] = made[0]
        assert request.prompt is not None
        prompts.append(request.prompt)
        scripted.follow(request.prompt + TURNS[len(prompts) - 1] + END)
        return made

    monkeypatch.setattr(responses, "make_response_chat", scripting)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=server.url))
    command = [codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "How much?"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "It costs 23."), done.stderr[-3000:]
    first, second, third = prompts
    assert second.startswith(first + RUN + END)
    assert third.startswith(second + CLOSE + END)
    assert "Output:\n23" in second
    assert "invalid agent id" in third  # the program's own answer: it has found the tool by its namespace
