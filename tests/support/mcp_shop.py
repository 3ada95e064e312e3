"""An MCP server: sells things, learns new ones, hangs, dies. By itself: over stdio; with a port: streamable HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

shop = MCPServer("shop")


@shop.tool()
def price(item: str, number: int = 1) -> str:
    """The price of an item."""
    if item == "moon":
        raise ToolError("the moon is not for sale")
    return f"{number} {item}: {23 * number}, says {os.environ.get('SHOP', 'nobody')}"


@shop.tool()
async def hang() -> str:
    """Never returns."""
    await asyncio.sleep(1000)
    return "late"


@shop.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@shop.tool()
def photo() -> Image:
    """A picture."""
    return Image(data=b"abc", format="png")


@shop.tool()
async def learn(name: str, ctx: Context) -> str:
    """A new tool."""

    def new() -> str:
        """New."""
        return f"{name}!"

    shop.add_tool(new, name=name)
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "learnt"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        shop.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        shop.run()
