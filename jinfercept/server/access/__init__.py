"""Who may do how much: API keys, their limits, and fair turns between them."""
