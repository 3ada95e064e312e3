"""A shop as an MCP server over streamable HTTP, by the Python SDK 1.x. Words behind the port: `stateless`, `json`."""

import sys
from importlib import import_module
from typing import Any

fastmcp: Any = import_module("mcp.server.fastmcp")
shop = fastmcp.FastMCP(
    "shop", port=int(sys.argv[1]), stateless_http="stateless" in sys.argv, json_response="json" in sys.argv
)


@shop.tool()
def price(item: str) -> str:
    """The price of an item."""
    if item == "moon":
        raise ValueError("the moon is not for sale")
    return f"{item}: 23"


async def learn(ctx: Any) -> str:
    """A new tool."""
    shop.add_tool(lambda: "fly!", name="fly", description="New.")
    await ctx.session.send_tool_list_changed()
    return "learnt"


learn.__annotations__["ctx"] = fastmcp.Context
shop.add_tool(learn)
shop.run("streamable-http")
