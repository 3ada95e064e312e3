"""What only the makers of jinfercept run: the GPU suite, load on servers, overheads.

Beside the wheel, run as `python -m benchmarks`.
"""
