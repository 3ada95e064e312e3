"""An MCP server over standard input and output that is made to be killed: `python -m` runs it. `mcp` comes with `tools`."""

import asyncio
from typing import Literal

Item = Literal["lamp", "pen", "moon"]


def price(item: Item) -> str:
    """The price of an item."""
    return f"{item}: {len(item)} dollars"


async def slow(item: Item) -> str:
    """The price of an item, after a while."""
    await asyncio.sleep(0.5)
    return price(item)


def failing(item: Item) -> str:
    """An error."""
    raise RuntimeError(f"no {item} today")


def main() -> None:
    """Serve until the input ends."""
    from mcp.server.mcpserver import MCPServer

    shop = MCPServer("shop", log_level="CRITICAL")  # its failures are meant
    for tool in (price, slow, failing):
        shop.tool()(tool)
    shop.run()


if __name__ == "__main__":
    main()
