"""What is counted of a running engine: totals, histograms, what every interception cost.

Decides nothing; knows no HTTP and no arrays.
"""
