"""The endpoints: each makes engine requests of a body of `protocols`, and an answer of their events."""
