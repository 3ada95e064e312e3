"""Several replicas of one server: which one a request goes to, and how many of them a load needs.

Only modules whose names begin with `ray_` import Ray.
"""
