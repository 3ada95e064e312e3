"""A server of MCP over streamable HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from mcp.server.mcpserver import MCPServer

from tests.support.tool_runner import until


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
