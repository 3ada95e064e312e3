"""The engine in virtual time: workloads, a runner that prices plans, decision records. Knows no JAX."""
