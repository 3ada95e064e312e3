"""Compiles for NVIDIA GPUs on a machine without one: JAX's CUDA plugin, the tools beside it, and the GPUs' descriptions."""
