"""Executes plans on the device: executables, the arrays of pages, sampling.

Knows slots and token ids, no requests and no policy.
"""
