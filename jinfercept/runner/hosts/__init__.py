"""Several processes that execute the plans of one scheduler: how they find each other, agree, stay in step and end together.

Knows plans and sockets; no JAX, no requests and no HTTP.
"""
