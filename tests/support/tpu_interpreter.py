"""JAX's interpreter of kernels for TPUs, with what jax's kernel of attention needs and jax 0.11 lacks. No TPU runs here.

The interpreter knows no references of another shape or type, and refuses a masked store to an array whose axes differ: see
`_read` and `_swap`. It does what a kernel says, copies and semaphores included, but keeps no limit of a TPU's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels for TPUs are interpreted on a CPU; skips a test where jax has its interpreter elsewhere."""
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(interpreter, "get", _read(interpreter.get))
        patch.setattr(interpreter, "swap", _swap(interpreter.swap, interpreter.get))
        yield


def _read(own: Any) -> Any:
    """A read of a reference, seen with another shape or type: what lies before that is read first."""

    @wraps(own)
    def read(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, views: Any, *rest: Any, **options: Any
    ) -> Any:
        views = jax.tree.map(int, views)
        first = next((place for place, view in enumerate(views) if not hasattr(view, "indices")), len(views))
        token, values = own(token, device, core, space, buffer, views[:first], *rest, **options)
        for view in views[first:]:
            values = _seen(values, view)
        return token, values

    return read


def _swap(own: Any, read: Any) -> Any:
    """A masked store as a read and a whole store."""

    @wraps(own)
    def swap(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, views: Any, value: Any, mask: Any, **rest: Any
    ) -> Any:
        if mask is not None:
            token, before = read(token, device, core, space, buffer, views)
            value = np.where(np.asarray(mask), np.asarray(value), before)
        return own(token, device, core, space, buffer, views, value, None, **rest)

    return swap


def _seen(values: np.ndarray, view: Any) -> np.ndarray:
    """Values as a reference's view has them: some of them, in another shape, or neighbours of an axis as one word."""
    if hasattr(view, "indices"):
        return values[tuple(map(_index, view.indices))]
    if hasattr(view, "shape"):
        return values.reshape(view.shape)
    return _words(values, jnp.dtype(view.dtype))


def _index(index: Any) -> int | slice:
    return (
        index if isinstance(index, int) else slice(index.start, index.start + index.size * index.stride, index.stride)
    )


def _words(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Rows of narrow numbers as rows of words, the first of them in the lowest bits, as they lie in a TPU's registers."""
    packed = dtype.itemsize // values.dtype.itemsize
    *before, rows, columns = values.shape
    pairs = np.swapaxes(values.reshape(*before, rows // packed, packed, columns), -1, -2)
    return np.ascontiguousarray(pairs).view(dtype)[..., 0]
