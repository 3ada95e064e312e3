"""Formats of tool calls and of reasoning, a file per model family: how a turn is read, its grammar, and its entry in a list.

Knows text, no tokenizer and no engine.
"""
