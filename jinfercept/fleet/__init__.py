"""Several replicas of one server: which one a request goes to. Knows the server, but no arrays.

Only modules whose names begin with `ray_` import Ray.
"""
