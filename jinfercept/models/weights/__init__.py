"""Weights and adapters given as arrays in memory: their names, their check, and how they take the place of those that serve.

Knows models and arrays, no engine.
"""
