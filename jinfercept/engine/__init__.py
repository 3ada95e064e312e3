"""The loop that serves requests: sessions, retained contexts, admission, the thread, event streams.

Knows no JAX and no HTTP.
"""
