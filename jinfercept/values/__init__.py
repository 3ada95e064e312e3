"""Values that callers pass and read: plain numbers, JSON schemas that a grammar can hold, vLLM's names, short `repr`s.

Knows errors only.
"""
