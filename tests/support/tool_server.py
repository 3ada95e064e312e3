"""A server that runs tools itself, on a model that writes what a script says; and what is said to it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from jinfercept.serve.server_tools import open_server_tools
from tests.support.live_server import END, MODEL, Running, prompt_of, running, until
from tests.support.scripted_model import Scripted
from tests.support.tool_runner import patient_endpoints

CODE = '''
import asyncio
from pathlib import Path

def price(item: str) -> str:
    """Its price."""
    if item == "moon":
        raise ValueError("not for sale")
    return {"lamp": "23", "pen": "4", "list": "1 " * 300, "": ""}[item]

async def hang() -> str:
    """Never returns."""
    Path(__file__).with_name("begun").touch()
    try:
        await asyncio.sleep(1000)
    finally:
        Path(__file__).with_name("cancelled").touch()
'''
TOML = """
[[tool]]
kind = "python"
function = "shop.py:price"
timeout_s = 60
max_result_tokens = 80

[[tool]]
kind = "python"
function = "shop.py:hang"
timeout_s = PATIENCE
"""
QUESTION: list[Any] = [{"role": "user", "content": "How much?"}]
BUY: Any = {
    "type": "function",
    "function": {"name": "buy", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}},
}
ALL = {"jinfercept": {"server_tools": True}}


@contextmanager
def shop(
    scripted: Scripted, folder: Path, *, patience_s: float = 0.3, toml: str = TOML, **options: Any
) -> Iterator[Running]:
    """The server; its tools are those of a file, and one of them never answers."""
    (folder / "shop.py").write_text(CODE)
    (folder / "tools.toml").write_text(toml.replace("PATIENCE", f"{patience_s}"))
    files = [str(folder / "tools.toml")]
    with patient_endpoints(), open_server_tools(files) as tools, running(scripted.llm, tools, **options) as server:
        yield server
        server.wait_idle()


def asks(name: str, item: str | None = None) -> str:
    """A call, as the model writes it."""
    arguments = {} if item is None else {"item": item}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def called(content: str, *calls: tuple[str, str | None]) -> dict[str, Any]:
    """A turn with calls, as a template reads it."""
    functions = [{"name": name, "arguments": {} if item is None else {"item": item}} for name, item in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "x", "function": function} for function in functions],
    }


def returned(text: str) -> dict[str, Any]:
    """A result, as a template reads it."""
    return {"role": "tool", "tool_call_id": "x", "content": text}


def says(scripted: Scripted, server: Running, text: str, messages: list[Any], own: Any = (), only: Any = None) -> str:
    """Have the model write what these messages say, and then a text; what it has read and written then."""
    names = only or list(server.service.tools.tools)
    tools = [*own, *(server.service.tools.tools[name] for name in names)]
    stream = prompt_of(scripted, messages, tools) + text + END
    scripted.follow(stream)
    return stream


def ask(server: Running, messages: Any, **fields: Any) -> Any:
    """OpenAI's client, without chance, and with all of the server's tools."""
    create: Any = server.client.chat.completions.create
    return create(**({"model": MODEL, "messages": messages, "temperature": 0, "extra_body": ALL} | fields))


def ask_and_leave(
    server: Running, messages: Any, reached: Callable[[], bool], path: str = "/v1/chat/completions", **fields: Any
) -> None:
    """A client that closes its connection when something has happened."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, **ALL, **fields}
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    until(reached)
    connection.close()


def cached(done: Any) -> int:
    """Tokens of the prompt that were not computed again."""
    return done.usage.prompt_tokens_details.cached_tokens
