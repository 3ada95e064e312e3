"""Executes plans on the device: executables, the arrays of pages, sampling; and the hosts that execute them together.

Knows slots and token ids, no requests and no policy.
"""
