"""Model families in Flax NNX, the loading of their weights from every format, and the choice of kernels for a device.

Knows weights and arrays, no requests and no pages.
"""
