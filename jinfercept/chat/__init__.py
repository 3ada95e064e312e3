"""Conversations as requests: templates, turns, function tools, tool choice. Knows no HTTP and no arrays."""
