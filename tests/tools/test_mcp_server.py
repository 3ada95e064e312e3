"""Tools of MCP servers: a real one over stdio that changes its tools and dies, a real one over HTTP that restarts."""

import asyncio
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from jinfercept.errors import ConfigError
from jinfercept.tools.load import load_tools
from tests.support.tool_runner import is_gone, serving, tool_runner, until

SHOP = Path(__file__).parents[1] / "support" / "mcp_shop.py"
STDIO = f'''
[[tool]]
kind = "mcp"
name = "shop"
command = "{sys.executable}"
args = ["{SHOP}"]
prefix = "shop_"
exclude = ["photo"]
env = {{SHOP = "${{JINFERCEPT_TEST_SHOP}}"}}
timeout_s = 60
'''


def test_a_server_over_stdio_is_discovered_learns_dies_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JINFERCEPT_TEST_SHOP", "Anna")
    program, away = tmp_path / "shop.py", tmp_path / "away.py"
    shutil.copy(SHOP, program)
    with tool_runner(tmp_path, STDIO.replace(f"{SHOP}", f"{program}")) as runner:
        names = ["shop_price", "shop_hang", "shop_die", "shop_learn"]
        assert [tool.name for tool in runner.loaded.tools] == names
        price = runner.loaded.tools[0]
        assert price.declaration["function"]["description"] == "The price of an item."
        assert price.parameters["required"] == ["item"]
        assert runner.ask("shop_price", item="lamp", number=2).text == "2 lamp: 46, says Anna"
        refused = runner.ask("shop_price", item="moon")
        assert (refused.status, refused.text[-24:]) == ("error", "the moon is not for sale")
        assert "Field required" in runner.ask("shop_price", thing="lamp").text

        assert runner.ask("shop_learn", name="fly").text == "learnt"
        until(lambda: [tool.name for tool in runner.loaded.tools] == [*names, "shop_fly"])
        assert runner.ask("shop_fly").text == "fly!"

        program.rename(away)
        runner.call("waits", "shop_hang")
        assert "lost during the call" in runner.ask("shop_die").text
        assert "lost during the call" in runner.result("waits").text
        meanwhile = runner.ask("shop_price", item="lamp")
        assert (meanwhile.status, "MCP server shop is not there" in meanwhile.text) == ("error", True)
        away.rename(program)
        until(lambda: runner.ask("shop_price", item="lamp").status == "ok")
        assert [tool.name for tool in runner.loaded.tools] == names
        before = threading.active_count()
    assert threading.active_count() < before


STUBBORN = """
import json, os, pathlib, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100"])
pathlib.Path("ids").write_text(f"{os.getpid()} {child.pid}")
about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}}
results = {"initialize": about, "tools/list": {"tools": []}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = results.get(asked["method"])
        answer = {"error": {"code": -32601, "message": "?"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | answer), flush=True)
threading.Event().wait()
"""
"""An MCP server that ignores the end of its input and SIGTERM, and has started another process."""


def test_a_server_that_does_not_end_is_killed_with_its_children_in_time(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "tools.toml").write_text(
        f'[[tool]]\nkind = "mcp"\nname = "shop"\ncommand = "{sys.executable}"\nargs = ["stubborn.py"]\n'
        f'cwd = "{tmp_path}"\n'
    )
    loaded = load_tools(tmp_path / "tools.toml")
    began_s = time.monotonic()
    loaded.close(0.6)
    assert time.monotonic() - began_s < 60, "the server is not waited for"
    for number in (tmp_path / "ids").read_text().split():
        until(lambda number=number: is_gone(int(number)))


@contextmanager
def http_shop(port: int) -> Iterator[None]:
    """A server over streamable HTTP, in a thread."""
    shop = MCPServer("shop")

    @shop.tool()
    def price(item: str) -> str:
        """The price of an item."""
        return f"{item}: 23"

    with serving(shop, port):
        yield


def test_a_server_over_http_that_goes_away_is_found_again(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    toml = f'[[tool]]\nkind = "mcp"\nname = "shop"\nurl = "http://127.0.0.1:{port}/mcp"\ntimeout_s = 60\n'
    with http_shop(port):
        manager = tool_runner(tmp_path, toml)
        runner = manager.__enter__()
        assert runner.ask("price", item="lamp").text == "lamp: 23"
    gone = runner.ask("price", item="lamp")
    assert gone.status == "error"
    assert "MCP server shop" in gone.text
    with http_shop(port):
        until(lambda: runner.ask("price", item="lamp").text == "lamp: 23")
        manager.__exit__(None, None, None)


def test_a_server_that_does_not_start_is_an_error_at_once(tmp_path: Path) -> None:
    for start, problem in (
        ('command = "no-such-program-of-mine"', "No such file"),
        (f'command = "{sys.executable}"\nargs = ["-c", "pass"]', "Connection closed"),
        (
            f'command = "{sys.executable}"\nargs = ["-c", "import sys; list(sys.stdin)"]\nconnect_timeout_s = 0.3',
            "does not answer",
        ),
        ('url = "http://127.0.0.1:9/mcp"', "ConnectError"),
    ):
        (tmp_path / "tools.toml").write_text(f'[[tool]]\nkind = "mcp"\nname = "shop"\n{start}\n')
        with pytest.raises(ConfigError, match=problem):
            load_tools(tmp_path / "tools.toml")


def test_loaded_tools_close_in_an_event_loop_too(tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks"\n')

    async def use() -> str:
        async with load_tools(tmp_path / "tools.toml") as loaded:
            [tool] = loaded.tools
            assert tool.tool is not None
            function: Any = tool.tool.function
            call = asyncio.ensure_future(function('{"question": "?"}'))
            await asyncio.to_thread(until, lambda: bool(loaded.inbox.pending()))
            loaded.inbox.answer(loaded.inbox.pending()[0].id, "yes")
            return await call

    assert asyncio.run(use()) == "yes"
