"""Copies of pages between the device and the host: the kernels, interpreted, and what a CPU does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.layouts.pages import OUT_OF_RANGE
from jinfercept.pallas.page_copies import pages_from_host, pages_to_host

NUM_PAGES, NUM_ROWS, PAGE_SHAPE = 6, 5, (4, 2, 6, 128)
"""Pages of more words than a program copies at once, and not a multiple of those."""


@pytest.mark.parametrize("how", [{"kernel": False}, {"kernel": True, "interpret": True}], ids=["reference", "kernels"])
def test_pages_are_copied_to_their_places_and_no_others(how: dict[str, bool]) -> None:
    numbers = np.random.default_rng(0)
    layers = tuple(jnp.asarray(numbers.normal(size=(NUM_PAGES, *PAGE_SHAPE)), jnp.bfloat16) for _ in range(2))
    words = [np.asarray(layer).view(np.uint32).reshape(NUM_PAGES, -1) for layer in layers]
    host = numbers.integers(0, 1 << 30, (NUM_ROWS, 2, words[0].shape[1]), np.uint32)
    places = jnp.array([[5, 2, OUT_OF_RANGE], [0, 4, OUT_OF_RANGE]], jnp.int32)
    left, came = jax.jit(
        lambda *pages: (pages_to_host(*pages, **how), pages_from_host(*pages, **how))  # pyright: ignore[reportArgumentType]
    )(layers, jnp.asarray(host), places)
    expected = host.copy()
    expected[[0, 4]] = np.stack([layer[[5, 2]] for layer in words], axis=1)
    assert np.array_equal(left, expected)
    for place, layer in enumerate(words):
        landed = layer.copy()
        landed[[5, 2]] = host[[0, 4], place]
        assert np.array_equal(np.asarray(came[place]).view(np.uint32).reshape(NUM_PAGES, -1), landed)
