"""Samples of prompts for reinforcement learning: arrays of what the model read and wrote, token by token. Knows no HTTP."""
