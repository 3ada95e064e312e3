"""The loop that serves requests: their lifecycle, retained contexts, admission, calls of tools, the thread, what is counted.

Knows no JAX and no HTTP.
"""
