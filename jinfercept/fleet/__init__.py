"""Several replicas of one server: which one a request goes to, and how many a load needs. Knows the server, but no arrays.

Only modules whose names begin with `ray_` import Ray.
"""
