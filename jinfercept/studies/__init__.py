"""Questions that the simulator answers, each with tables, sentences and a picture. Knows the simulator, and no JAX."""
