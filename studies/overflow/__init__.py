"""Recompute or swap when running requests overflow the KV pool: the figures of an SC24 poster, simulated and measured."""
