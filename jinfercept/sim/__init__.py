"""The engine in virtual time: workloads, a runner that prices plans, and checks of a user's own policy. Knows no JAX."""
