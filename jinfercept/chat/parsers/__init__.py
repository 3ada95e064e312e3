"""Formats of tool calls and of reasoning, a file per model family: how a turn is read, its grammar, its entry.

Knows text, no tokenizer and no engine.
"""
