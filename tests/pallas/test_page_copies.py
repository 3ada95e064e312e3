"""The kernels that copy pages do what gathers and scatters do, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.pallas.layout import OUT_OF_RANGE
from jinfercept.pallas.page_copies import _copy, _in_kernel, _out_kernel, pages_from_host, pages_to_host

NUM_PAGES, NUM_ROWS, PAGE_SHAPE = 6, 5, (4, 2, 6, 128)
"""Pages of more words than a program copies at once, and not a multiple of those."""
PLACES = np.array([[5, 2, OUT_OF_RANGE], [0, 4, OUT_OF_RANGE]], np.int32)


def test_kernels_copy_the_pages_that_gathers_and_scatters_copy_and_no_others() -> None:
    numbers = np.random.default_rng(0)
    layers = tuple(jnp.asarray(numbers.normal(size=(NUM_PAGES, *PAGE_SHAPE)), jnp.bfloat16) for _ in range(2))
    words = [np.asarray(layer).view(np.uint32).reshape(NUM_PAGES, -1) for layer in layers]
    host = numbers.integers(0, 1 << 30, (NUM_ROWS, 2, words[0].shape[1]), np.uint32)

    left = jax.jit(lambda *arguments: pages_to_host(*arguments, kernel=False))(layers, host, PLACES)
    came = jax.jit(lambda *arguments: pages_from_host(*arguments, kernel=False))(layers, host, PLACES)
    [left_kernel] = _copy(_out_kernel, PLACES, tuple(words), (host,), interpret=True)
    came_kernel = _copy(_in_kernel, PLACES, (host,), tuple(words), interpret=True)

    expected = host.copy()
    expected[[0, 4]] = np.stack([layer[[5, 2]] for layer in words], axis=1)
    assert np.array_equal(left, expected)
    assert np.array_equal(left_kernel, expected)
    for place, layer in enumerate(words):
        landed = layer.copy()
        landed[[5, 2]] = host[[0, 4], place]
        assert np.array_equal(np.asarray(came[place]).view(np.uint32).reshape(NUM_PAGES, -1), landed)
        assert np.array_equal(came_kernel[place], landed)
