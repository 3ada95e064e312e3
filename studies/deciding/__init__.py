"""Where the choice of a policy matters, over machines, loads and clients that return. Imports no JAX."""
