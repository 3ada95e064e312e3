"""Finds calls in generated tokens, has tools answer them off-thread, and renders the results.

Knows no model family and no engine.
"""
