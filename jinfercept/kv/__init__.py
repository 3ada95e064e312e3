"""Where contexts live. The host half (page, pool, manager) is pure Python; the device half (`arrays`) is JAX and is
imported by the runner alone."""
