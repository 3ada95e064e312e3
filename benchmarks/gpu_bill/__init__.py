"""The GPU bill: what a step costs a GPU, read from code compiled ahead of time."""
