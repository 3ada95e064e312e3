"""Sizes, measures and warms up an engine, and puts it together from its parts. Knows no HTTP and no conversations."""
