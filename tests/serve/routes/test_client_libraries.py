"""Client libraries, set up by environment variables: each has two tools run over three turns, and the conversation goes on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_templates import QWEN
from tests.support.fetched_packages import npm_packages, python_packages
from tests.support.live_server import MODEL, Running, running
from tests.support.scripted_model import Scripted, scripted_llm, write_turns

FOLDER = Path(__file__).parents[2] / "support" / "client_programs"
LENGTH = 16384
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: requests to other machines fail."""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FIRST, SECOND = call("price", item="lamp"), f"{call('price', item='pen')}\n{call('stock', item='lamp')}"
ANSWERS = ["It costs 23.", "Then 46."]
RESULTS = ("23", "not for sale", "And two?")
"""Parts of what comes behind each of the first three turns."""


@dataclass(frozen=True)
class Library:
    """A client library, and a program with it.

    Attributes:
        packages: of npm or pip, with their versions.
        program: a function of `programs.py`, or another file of `FOLDER`.
        apis: arguments of the program, for one run each.
        written: what the model writes in each turn.
        keeps_calls: whether the library sends calls back as calls.
    """

    packages: tuple[str, ...]
    program: str
    apis: tuple[str, ...]
    written: tuple[str, ...] = (FIRST, f"Both.\n{SECOND}", *ANSWERS)
    keeps_calls: bool = True


PROVIDERS = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/openai/chat", "@ai-sdk/anthropic")
AI_SDK_6 = ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140")
AI_SDK_7 = ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105")
LANGCHAIN = ("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10")
PYDANTIC = ("pydantic-ai-slim[openai,anthropic]==2.68.0",)  # a stream of it ends with the first text
FINAL = tuple(call("final_answer", answer=answer) for answer in ANSWERS)
LIBRARIES = (
    Library((*AI_SDK_6, "zod@4.6.7"), "ai_sdk.mjs", PROVIDERS),
    Library((*AI_SDK_7, "zod@4.6.7", "node@22.23.3"), "ai_sdk.mjs", PROVIDERS),
    Library(("openai-agents==0.24.0",), "openai_agents", ("chat", "mcp", "responses", "stored", "conversation")),
    Library(LANGCHAIN, "langchain", ("chat", "responses", "stored", "messages")),
    Library(("litellm==1.110.2",), "litellm", ("openai", "anthropic")),
    Library(PYDANTIC, "pydantic", ("chat", "responses", "messages"), (FIRST, SECOND, *ANSWERS)),
    Library(("anthropic==2.14.0",), "anthropic", ("messages",)),
    Library(("strands-agents[openai,anthropic]==1.62.0",), "strands", ("chat", "responses", "messages")),
    Library(("google-adk==2.13.0", "litellm==1.110.2"), "adk", ("openai", "anthropic")),
    Library(("smolagents[openai]==1.26.0",), "smolagents", ("chat",), (FIRST, SECOND, *FINAL), False),
)
RUNS = [pytest.param(library, api, id=f"{library.packages[0]}-{api}") for library in LIBRARIES for api in library.apis]


def test_the_docs_name_the_versions_that_are_driven() -> None:
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    for package in {package for library in LIBRARIES for package in library.packages[:4]}:
        name, version = package.replace("==", "@").rsplit("@", 1)
        assert name.partition("[")[0] in page
        assert version in page


@pytest.fixture(scope="module")
def long() -> Iterator[tuple[Scripted, Running]]:
    """A server whose model has room for smolagents' own prompt."""
    with scripted_llm(LENGTH) as make:
        scripted = make(QWEN)
        with running(scripted.llm, max_prompt_chars=1_000_000) as server:
            yield scripted, server


def run(server: Running, home: Path, packages: Sequence[str], program: str, *words: str) -> list[dict[str, Any]]:
    """What a program of a library prints, that knows the server by environment variables only."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "MODEL": MODEL,
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_DEFAULT_MODEL": MODEL,  # of openai-agents
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
    }
    if program.endswith(".mjs"):
        home = npm_packages(*packages)
        environment["PATH"] = f"{home / 'node_modules/.bin'}:{os.environ['PATH']}"
        environment["ANTHROPIC_BASE_URL"] += "/v1"
        command = [shutil.which("node", path=environment["PATH"]), FOLDER / program]
    else:
        environment["PYTHONPATH"] = str(python_packages(*packages))
        command = [sys.executable, FOLDER / "programs.py", program]
    done = subprocess.run(
        [*command, *words],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"text"')]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize(("library", "api"), RUNS)
def test_two_tools_run_over_three_turns_and_the_conversation_goes_on(
    long: tuple[Scripted, Running], library: Library, api: str, how: str, monkeypatch: Any, tmp_path: Path
) -> None:
    scripted, server = long
    prompts = write_turns(monkeypatch, scripted, library.written, "price")
    answers = run(server, tmp_path, library.packages, library.program, api, how)
    assert [answer["text"] for answer in answers] == ANSWERS
    assert all(answer["pieces"] is None or answer["pieces"] > 3 for answer in answers)
    assert len(prompts) == len(library.written)
    for before, says, prompt, result in zip(prompts, library.written, prompts[1:], RESULTS, strict=False):
        assert prompt.startswith(before + says) or not library.keeps_calls
        assert result in prompt[len(before) :]
    server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(
    long: tuple[Scripted, Running], method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted, server = long
    price = '{"item": "lamp", "dollars": 23, "kind": "new"}'
    called = f'<tool_call>\n{{"name": "Price", "arguments": {price}}}\n</tool_call>'
    write_turns(monkeypatch, scripted, [price if method == "json_schema" else called], None)
    [answer] = run(server, tmp_path, LANGCHAIN, "langchain_structured", method)
    assert json.loads(answer["text"]) == json.loads(price)
