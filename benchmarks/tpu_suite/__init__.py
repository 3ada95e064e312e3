"""Measures this machine's TPUs: what the suite has of its own for them. No TPU has run it."""
