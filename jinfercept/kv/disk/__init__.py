"""Disk tier: the KV of page runs in files, one for each run, found by their tokens, across restarts.

Knows tokens and KV as bytes; knows no arrays, no contexts and no policy.
"""
