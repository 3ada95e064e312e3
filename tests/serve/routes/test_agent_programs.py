"""The agents' own programs, set up by environment variables only: they run their tools and send the results for three turns."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_templates import QWEN
from tests.support.fetched_packages import npm_packages
from tests.support.live_server import MODEL, Running, running
from tests.support.scripted_model import Scripted, scripted_llm, write_turns

LENGTH = 131072
"""The programs' own prompts have up to 77,000 bytes, each of which is a token of the scripted model."""
ANSWER = "It costs 23."
OPENAI_MODEL = "gpt-5.6-luna"
"""A name for which Codex sends its tools as an item, `additional_tools`, and Copilot has a custom tool."""
CODEX_CONFIG = """\
model = "{model}"
model_provider = "jinfercept"
[model_providers.jinfercept]
name = "jinfercept"
base_url = "{url}/v1"
wire_api = "responses"
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Program:
    """An agent's program.

    Attributes:
        package: of npm, with its version.
        name: of its command.
        words: of the command, which asks how much something costs.
        environment: of a server's URL and a home folder.
        calls: the calls that the model writes in the first two turns.
        results: parts of their results.
        warms_up: whether it has its first prompt computed before it asks.
    """

    package: str
    name: str
    words: tuple[str, ...]
    environment: Callable[[str, Path], Mapping[str, str]]
    calls: tuple[str, str]
    results: tuple[str, str]
    warms_up: bool = False


def _codex(url: str, home: Path, model: str = MODEL) -> Mapping[str, str]:
    (home / "config.toml").write_text(CODEX_CONFIG.format(model=model, url=url))
    return {"CODEX_HOME": str(home)}


def _codex_of_openai(url: str, home: Path) -> Mapping[str, str]:
    return _codex(url, home, OPENAI_MODEL)


def _codex_over_a_socket(url: str, home: Path) -> Mapping[str, str]:
    variables = _codex(url, home)
    with (home / "config.toml").open("a") as file:
        file.write("supports_websockets = true\n")
    return variables


def _claude(url: str, home: Path) -> Mapping[str, str]:
    model = {"ANTHROPIC_MODEL": MODEL, "ANTHROPIC_SMALL_FAST_MODEL": MODEL}
    return model | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "DISABLE_AUTOUPDATER": "1"}


def _opencode(url: str, home: Path) -> Mapping[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    config = {"provider": {"jinfercept": provider}, "model": f"jinfercept/{MODEL}", "autoupdate": False}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _qwen(url: str, home: Path) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}


def _cline(url: str, home: Path) -> Mapping[str, str]:
    settings = {"provider": "openai-compatible", "apiKey": "none", "model": MODEL, "baseUrl": f"{url}/v1"}
    providers = {
        "openai-compatible": {"settings": settings, "updatedAt": "2026-11-01T00:00:00.000Z", "tokenSource": "manual"}
    }
    file = home / ".cline" / "data" / "settings" / "providers.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"version": 1, "lastUsedProvider": "openai-compatible", "providers": providers}))
    return {"CLINE_SESSION_BACKEND_MODE": "local"}  # else it leaves a process behind


def _pi(url: str, home: Path) -> Mapping[str, str]:
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [{"id": MODEL}]}
    file = home / ".pi" / "agent" / "models.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"providers": {"jinfercept": provider}}))
    return {"PI_OFFLINE": "1"}


def _copilot(url: str, home: Path) -> Mapping[str, str]:
    model = {"COPILOT_MODEL": OPENAI_MODEL, "COPILOT_PROVIDER_API_KEY": "none"}
    return model | {"COPILOT_PROVIDER_BASE_URL": f"{url}/v1", "COPILOT_OFFLINE": "true"}


PROGRAMS = (
    Program(
        "@openai/codex@0.171.0",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "How much?"),
        _codex,
        (call("exec_command", cmd="printf 2; printf 3"), call("multi_agent_v1__close_agent", target="x")),
        ("Output:\n23", "invalid agent id"),  # the second is its own answer: it has found the tool by its namespace
    ),
    Program(
        "@openai/codex@0.171.0",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "How much?"),
        _codex_over_a_socket,
        (call("exec_command", cmd="printf 2; printf 3"), call("multi_agent_v1__close_agent", target="x")),
        ("Output:\n23", "invalid agent id"),  # the second is its own answer: it has found the tool by its namespace
        warms_up=True,
    ),
    Program(
        "@openai/codex@0.171.0",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "How much?"),
        _codex_of_openai,
        (
            call("functions__exec", input='text(await tools.exec_command({cmd: "printf 2; printf 3"}))'),
            call("functions__wait", cell_id="x"),
        ),
        ('"output":"23"', "exec cell x not found"),
    ),
    Program(
        "@anthropic-ai/claude-code@2.1.332",
        "claude",
        ("-p", "How much?", "--allowedTools", "Bash,Read"),
        _claude,
        (call("Bash", command="printf 2; printf 3"), call("Read", file_path="price.txt")),
        ("23", "lamp: 23"),
    ),
    Program(
        "opencode-ai@1.18.33",
        "opencode",
        ("run", "How much?"),
        _opencode,
        (call("bash", command="printf 2; printf 3", description="prints"), call("read", filePath="price.txt")),
        ("23", "lamp: 23"),
    ),
    Program(
        "@qwen-code/qwen-code@0.24.4",
        "qwen",
        ("-p", "How much?", "--yolo", "--auth-type", "openai"),
        _qwen,
        (
            call("run_shell_command", command="printf 2; printf 3", is_background=False),
            call("read_file", file_path="price.txt"),
        ),
        ("23", "You must provide an absolute path"),
    ),
    Program(
        "cline@3.0.65",
        "cline",
        ("How much?",),
        _cline,
        (call("run_commands", commands=["printf 2; printf 3"]), call("read_files", files=[{"path": "price.txt"}])),
        ("23", "lamp: 23"),
    ),
    Program(
        "@mariozechner/pi-coding-agent@0.73.1",
        "pi",
        ("--provider", "jinfercept", "--model", MODEL, "-p", "How much?"),
        _pi,
        (call("bash", command="printf 2; printf 3"), call("read", path="price.txt")),
        ("23", "lamp: 23"),
    ),
    Program(
        "@github/copilot@1.0.102",
        "copilot",
        ("-p", "How much?", "--allow-all-tools", "--silent"),
        _copilot,
        (
            call("bash", command="printf 2; printf 3", description="prints"),
            call("apply_patch", input="*** Begin Patch\n*** Add File: pen.txt\n+pen: 4\n*** End Patch\n"),
        ),
        ("23", "pen.txt"),  # with this name of a model it has a custom tool
    ),
)


def test_the_docs_name_the_versions_that_are_driven() -> None:
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    for program in PROGRAMS:
        name, version = program.package.rsplit("@", 1)
        assert f"`{name}` {version}" in page


def command(program: Program) -> str:
    """The program's command: the installed one, or one that npm fetches."""
    if (installed := shutil.which(program.name)) is not None:
        return installed
    folder = npm_packages(program.package)
    setup = folder / "node_modules" / program.package.partition("@1")[0] / "postinstall.mjs"
    if setup.exists():  # npm may leave scripts of packages out
        subprocess.run(["node", setup], cwd=setup.parent, check=True, capture_output=True)
    return str(folder / "node_modules/.bin" / program.name)


@pytest.fixture(scope="module")
def long() -> Iterator[tuple[Scripted, Running]]:
    """A server whose model has a long context."""
    with scripted_llm(LENGTH) as make:
        scripted = make(QWEN)
        names = (MODEL, OPENAI_MODEL)
        with running(scripted.llm, max_prompt_chars=1_000_000, served_model_name=names) as server:
            yield scripted, server


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_runs_its_tools_over_three_turns(
    long: tuple[Scripted, Running], program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted, server = long
    tool = json.loads(program.calls[0].splitlines()[1])["name"]
    warm_ups = ("",) * program.warms_up
    prompts = write_turns(monkeypatch, scripted, (*warm_ups, *program.calls, ANSWER), tool)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "price.txt").write_text("lamp: 23\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **program.environment(server.url, home)}
    done = subprocess.run(
        [command(program), *program.words],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, [ANSWER]), done.stderr[-3000:]
    del prompts[: len(warm_ups)]
    for before, says, after, result in zip(prompts, program.calls, prompts[1:], program.results, strict=False):
        assert says in after
        assert result in after[len(before) :]
    assert len(prompts) == 3
    server.wait_idle()
