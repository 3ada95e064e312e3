"""Formats of tool calls and of reasoning, a file per model family: its reader, its grammar, its entry.

Knows text, no tokenizer and no engine.
"""
