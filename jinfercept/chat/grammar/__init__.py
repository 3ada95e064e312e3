"""Structured outputs as masks over the vocabulary: the only user of llguidance.

Knows no requests and no arrays of the device.
"""
