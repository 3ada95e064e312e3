"""The TPU bill: what a step costs a TPU, read from code compiled ahead of time. No TPU has run any of it."""
