"""Who may do how much: API keys and their limits."""
