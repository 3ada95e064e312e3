"""The engine in virtual time: workloads, and a runner that prices plans. Knows no JAX."""
