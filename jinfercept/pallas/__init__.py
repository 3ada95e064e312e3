"""Attention over pages: the array layout, the kernels, their reference.

Knows arrays only: imports nothing else of jinfercept.
"""
