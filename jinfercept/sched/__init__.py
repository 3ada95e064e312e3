"""Which tokens run and which pages move, decided without JAX: sequences, plans, policies, the scheduler.

Time arrives as `now`."""
