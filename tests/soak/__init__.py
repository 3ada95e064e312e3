"""A soak of a server by random and hostile clients: `python -m tests.soak --minutes 10`."""
