"""Attention over pages and quantised products: kernels for GPUs and TPUs, their reference, how arrays lie in memory.

Knows arrays only: imports nothing else of jinfercept.
"""
