"""Executes plans on the devices: executables, arrays of pages, transfers, sampling; and the hosts that execute plans in step.

Knows slots and token ids, no requests and no policy.
"""
