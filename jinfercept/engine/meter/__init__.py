"""Counts what an engine does: totals, histograms, step times, waste, the cost of every interception.

Decides nothing; knows no HTTP and no arrays.
"""
