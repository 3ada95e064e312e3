"""What a running engine is measured by: counts, times, the history of its pool. Decides nothing; no HTTP, no arrays."""
