"""Attention over pages and quantised products: the kernels for GPUs, the reference, and the choice between all there are.

Knows arrays only: imports `layouts` and `cpu_kernels`, nothing else of jinfercept.
"""
