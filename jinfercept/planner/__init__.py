"""How many replicas of which kind a load needs, by simulated fleets. Knows the router and the simulator, and no arrays."""
