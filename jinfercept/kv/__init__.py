"""Pages: where every page of KV is, who uses it, and what a context consists of.

Pure Python: knows no JAX, no numpy and no policy.
"""
