"""Who answers calls: Python functions, HTTP, MCP servers, other models, people.

Knows calls and results, no pages and no scheduler. The packages that it needs come with the extra `tools`.
"""
