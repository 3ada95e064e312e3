"""Conversations as requests: tokens, templates, grammars, formats of calls and of reasoning, function tools.

Knows no HTTP and no arrays.
"""
