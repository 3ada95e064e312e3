"""Measures a device: what the suites of GPUs and of TPUs have in common. Runs on the device, or at tiny shapes on a CPU."""
