"""The choice between XLA's products of few rows on a GPU and a kernel of our own, while a model is traced.

XLA's products are cuBLAS' or Triton's, as its autotuner times them. No GPU has timed ours yet: it is off by default.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.pallas import gpu_kernels

MOST_ROWS = 64
"""Above, a product reads its rows as often as cuBLAS' tiles do, and multiplies at no better rate."""
_CHOSEN = ContextVar("skinny_products", default=False)


@contextmanager
def skinny_products() -> Iterator[None]:
    """While a model is traced here, products of few rows on a GPU take the kernel where it supports them."""
    token = _CHOSEN.set(True)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def skinny_product(
    x: Float[Array, "T K"] | jax.ShapeDtypeStruct, weight: Float[Array, "K N"] | jax.ShapeDtypeStruct, out: DTypeLike
) -> Callable[[Float[Array, "T K"], Float[Array, "K N"]], Float[Array, "T N"]] | None:
    """The kernel for `x @ weight`, of which the shapes and types count; None where XLA multiplies."""
    if not _CHOSEN.get():
        return None
    product = gpu_kernels.skinny_product(x, weight)
    return None if product is None else partial(product, out=out)
