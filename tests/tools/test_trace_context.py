"""The context of a trace goes on to the HTTP endpoints, models and MCP servers that answer a call, and to no other host."""

import contextvars
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer

from jinfercept.engine.tool_executor import CURRENT_CALL, CurrentCall, ToolRun
from jinfercept.tools.load import LoadedTools, load_tools
from tests.support.tool_runner import serving

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "vendor=opaque"}
TOML = """
[[tool]]
kind = "http"
name = "web"
description = "asks"
url = "http://127.0.0.1:PORT/answer"
allow_hosts = ["127.0.0.1"]

[[tool]]
kind = "http"
name = "abroad"
description = "asks"
url = "http://127.0.0.1:PORT/moved"
allow_hosts = ["127.0.0.1", "localhost"]

[[tool]]
kind = "http"
name = "own"
description = "asks"
url = "http://127.0.0.1:PORT/answer"
allow_hosts = ["127.0.0.1"]
headers = {traceparent = "of the table"}

[[tool]]
kind = "model"
name = "model"
description = "knows"
model = "big"
base_url = "http://127.0.0.1:PORT/v1"

[[tool]]
kind = "mcp"
name = "shop"
url = "http://127.0.0.1:MCP/mcp"
timeout_s = 60
"""


class TracedSite(ThreadingHTTPServer):
    """Answers as a page, as a model, or with a redirect to another name of its host; records the trace's headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TracedSiteHandler)
        self.seen: list[dict[str, str]] = []


class TracedSiteHandler(BaseHTTPRequestHandler):
    server: TracedSite  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append({name: self.headers[name] for name in TRACE if name in self.headers})
        answer = json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode()
        self.send_response(302 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("location", f"http://localhost:{self.server.server_address[1]}/answer")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def mcp_server(seen: list[dict[str, Any]]) -> Iterator[int]:
    """An MCP server over HTTP with one tool, which records the metadata of its calls."""
    shop = MCPServer("shop")

    @shop.tool()
    def price(ctx: Context) -> str:
        """A price."""
        seen.append(dict(ctx.request_context.meta or {}))
        return "23"

    with serving(shop) as port:
        yield port


def call(loaded: LoadedTools, name: str, trace: dict[str, str]) -> str:
    """The result of a call within a trace."""
    [tool] = [loaded_tool.tool for loaded_tool in loaded.tools if loaded_tool.name == name]
    assert tool is not None

    def begin() -> ToolRun[str]:
        CURRENT_CALL.set(CurrentCall(name, trace=trace))
        run: Any = tool.function('{"question": "?"}' if name == "model" else "{}")
        assert isinstance(run, ToolRun)
        return run

    return contextvars.copy_context().run(begin).result.result(60)


def test_the_context_of_a_trace_goes_on_to_tools(tmp_path: Path) -> None:
    metas: list[dict[str, Any]] = []
    with TracedSite() as site, mcp_server(metas) as port:
        threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True).start()
        file = tmp_path / "tools.toml"
        file.write_text(TOML.replace("PORT", f"{site.server_address[1]}").replace("MCP", f"{port}"))
        with load_tools(file) as loaded:
            for name, seen in (
                ("web", [TRACE]),
                ("abroad", [TRACE, {}]),
                ("own", [TRACE | {"traceparent": "of the table"}]),
                ("model", [TRACE]),
            ):
                site.seen.clear()
                assert "hello" in call(loaded, name, TRACE)
                assert site.seen == seen
            assert call(loaded, "price", TRACE) == "23"
            assert call(loaded, "price", {}) == "23"
            assert [{key: meta[key] for key in TRACE if key in meta} for meta in metas] == [TRACE, {}]
        site.shutdown()
