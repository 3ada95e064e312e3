"""Finds calls in generated tokens, has endpoints answer them off-thread, and renders the results.

Knows no model family and no engine.
"""
