"""Model families in Flax NNX, and the loading of their weights from every format.

Knows weights and arrays, no requests and no pages.
"""
