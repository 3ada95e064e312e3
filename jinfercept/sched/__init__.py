"""Decides which tokens run and which pages move: plans, queues, policies, waste, estimators, profiles.

Knows no JAX, no text, no clock.
"""
