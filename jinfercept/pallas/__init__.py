"""Attention over pages: the array layout, the implementations and their reference oracles. Imports nothing of jinfercept."""
