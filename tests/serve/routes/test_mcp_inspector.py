"""Tools of MCP's reference server: the model calls two of them over three turns, and reads what MCP's Inspector shows."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jinfercept.serve.server_tools import open_server_tools
from tests.support.chat_templates import QWEN
from tests.support.fetched_packages import npm_packages
from tests.support.live_server import END, MODEL, prompt_of, running
from tests.support.scripted_model import Make
from tests.support.tool_runner import patient_endpoints

PACKAGES = ("@modelcontextprotocol/inspector@2.12.0", "@modelcontextprotocol/server-everything@2026.8.31")
ROOTS = "get-roots-list"
"""A tool for clients that share folders, as the Inspector does."""
TOML = """
[[tool]]
kind = "mcp"
name = "everything"
timeout_s = 60
connect_timeout_s = 60
"""
QUESTION: Any = {"role": "user", "content": "How much is 1 and 2?"}
MORE: Any = {"role": "user", "content": "Sure?"}
FIRST, SECOND = [("echo", {"message": "hi"})], [("get-sum", {"a": 1, "b": 2}), ("get-sum", {"a": 1})]


def command(name: str) -> str:
    return str(npm_packages(*PACKAGES) / "node_modules/.bin" / name)


@contextmanager
def over_stdio() -> Iterator[tuple[list[str], str]]:
    """Arguments of the Inspector, and the option of the server's tools."""
    program = command("mcp-server-everything")
    yield [program], f'command = "{program}"'


@contextmanager
def over_http() -> Iterator[tuple[list[str], str]]:
    """As `over_stdio`, of a server that runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [command("mcp-server-everything"), "streamableHttp"]
    environment = {"PATH": os.environ["PATH"], "PORT": str(port)}
    with subprocess.Popen(
        program, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stderr is not None
        next(line for line in server.stderr if "listening" in line)
        url = f"http://127.0.0.1:{port}/mcp"
        yield ["--transport", "http", url], f'url = "{url}"'
        server.terminate()


def inspected(target: Sequence[str], *words: str) -> dict[str, Any]:
    """What the Inspector's client shows."""
    program = [command("mcp-inspector"), "--cli", *target, "--method", *words]
    return json.loads(subprocess.run(program, capture_output=True, text=True, timeout=100, check=False).stdout)


def result(target: Sequence[str], name: str, arguments: dict[str, Any]) -> str:
    """The result of a call as the model reads it, from the Inspector's."""
    words = [word for key, value in arguments.items() for word in ("--tool-arg", f"{key}={value}")]
    shown = inspected(target, "tools/call", "--tool-name", name, *words)
    [part] = shown["content"]
    return f"error: CallFailed: {part['text']}" if shown.get("isError") else part["text"]


def turn(target: Sequence[str], calls: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, list[dict[str, Any]]]:
    """What the model writes to call, and the messages of the calls and their results."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{json.dumps(function)}\n</tool_call>" for function in functions)
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x", "function": function} for function in functions],
    }
    results = [{"role": "tool", "tool_call_id": "x", "content": result(target, *call)} for call in calls]
    return text, [called, *results]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("connection", "stream"), [(over_stdio, False), (over_http, True)], ids=["stdio", "http"])
def test_two_tools_of_an_mcp_server_run_over_three_turns(
    make_scripted: Make, tmp_path: Path, connection: Any, stream: bool
) -> None:
    scripted, file = make_scripted(QWEN), tmp_path / "tools.toml"
    with connection() as (target, option):
        file.write_text(TOML + option)
        with patient_endpoints(), open_server_tools([str(file)]) as tools, running(scripted.llm, tools) as server:
            offered = server.service.tools.tools
            shown = {tool["name"]: tool["inputSchema"] for tool in inspected(target, "tools/list")["tools"]}
            assert {name: tool.parameters for name, tool in offered.items()} | {ROOTS: shown[ROOTS]} == shown

            names = ["echo", "get-sum"]
            declared = [offered[name] for name in names]
            (first, called), (second, again) = turn(target, FIRST), turn(target, SECOND)
            chats = [[QUESTION], [QUESTION, *called], [QUESTION, *called, *again]]
            says = [first, second, "It is 3."]
            chats.append([*chats[-1], {"role": "assistant", "content": says[-1]}, MORE])
            says.append("Yes.")
            texts = [prompt_of(scripted, chat, declared) + text + END for chat, text in zip(chats, says, strict=True)]
            assert all(after.startswith(before) for before, after in pairwise(texts))
            scripted.follow(texts[-1])

            for messages, says_last in ((chats[0], says[2]), ([QUESTION, *chats[3][-2:]], says[3])):
                body: Any = {"model": MODEL, "messages": messages, "temperature": 0, "stream": stream}
                create: Any = server.client.chat.completions.create
                done = create(**body, extra_body={"jinfercept": {"server_tools": names}})
                if stream:
                    answer = "".join(chunk.choices[0].delta.content or "" for chunk in done if chunk.choices)
                else:
                    answer = done.choices[0].message.content
                assert answer == says_last
            server.wait_idle()
