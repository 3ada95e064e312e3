"""The loop that serves requests: their lifecycle, retained contexts, admission, the thread, event streams.

Knows no JAX and no HTTP.
"""
