"""Tools that are run here: Python functions, HTTP, MCP servers, other models, people. What outside packages they need, the
extra `tools` brings, and it is imported when such a tool is loaded."""
