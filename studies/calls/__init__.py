"""Asynchronous calls beside synchronous and parallel ones: latency, memory, and the formulas."""
