"""An MCP server over stdio with the tools of the client programs."""

# pyright: reportMissingImports=false
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from price_tools import price, stock

server = MCPServer("shop")
server.add_tool(price)


@server.tool("stock")
def failing(item: str) -> str:
    """How many there are."""
    try:
        return stock(item)
    except ValueError as error:
        raise ToolError(str(error)) from error


server.run()
