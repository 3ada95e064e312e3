"""Coding agents of 100,000 tokens: policies and published rivals over pools, models and seeds. Imports no JAX."""
