"""Llama and GPT-J in Flax NNX, and their loading: arrays in, arrays out.

Knows nothing of pages, requests or schedules.
"""
