"""How arrays lie in memory, which models, the runner and every kernel agree on: pages of KV, packed weights, rows of products.

Knows arrays only: imports nothing else of jinfercept.
"""
