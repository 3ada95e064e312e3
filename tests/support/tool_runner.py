"""Tools of a TOML file, called as an engine calls them, and a server of MCP over streamable HTTP."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer

from jinfercept.calls import Call, Result
from jinfercept.engine.dispatcher import Dispatcher
from jinfercept.tools.load import LoadedTools, load_tools


class ToolRunner:
    """Loaded tools and a dispatcher that runs them."""

    def __init__(self, loaded: LoadedTools) -> None:
        self.loaded = loaded
        self._wake = threading.Event()
        self.dispatcher = Dispatcher(self._wake.set)
        self._done: dict[str, tuple[Result, ...]] = {}

    def call(self, request_id: str, name: str, /, **arguments: Any) -> None:
        """Begin a call of one request."""
        tools = {tool.name: tool.tool for tool in self.loaded.tools if tool.tool is not None}
        self.dispatcher.call(request_id, (Call(name, json.dumps(arguments)),), tools)

    def result(self, request_id: str) -> Result:
        """What came of a request's call."""
        give_up_s = time.monotonic() + 60
        while request_id not in self._done:
            assert time.monotonic() < give_up_s, "it never returns"
            self._done.update(self.dispatcher.poll())
            self._wake.wait(0.01)
            self._wake.clear()
        [result] = self._done.pop(request_id)
        return result

    def ask(self, name: str, /, **arguments: Any) -> Result:
        """Call and wait."""
        self.call("one", name, **arguments)
        return self.result("one")


@contextmanager
def patient_endpoints() -> Iterator[None]:
    """Tools that are loaded meanwhile end their calls themselves at a time-out, however late they notice it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jinfercept.tools.calls._GRACE_S", 60.0)
        yield


@contextmanager
def tool_runner(folder: Path, toml: str) -> Iterator[ToolRunner]:
    """The tools of a TOML text."""
    file = folder / "tools.toml"
    file.write_text(toml)
    with patient_endpoints(), load_tools(file) as loaded:
        runner = ToolRunner(loaded)
        yield runner
        runner.dispatcher.close()


def until(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that happens on other threads."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.002)


def is_gone(process_id: int) -> bool:
    """Whether a process has ended; a process that has ended before its parent waited for it is a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def serving(shop: MCPServer, port: int = 0) -> Iterator[int]:
    """Serve in a thread at a port, or one that is free; gives the port."""
    server = uvicorn.Server(uvicorn.Config(shop.streamable_http_app(), port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join()
