"""What may stand for a weight where weights are given in memory: an array, one that is yet to be made, or nothing new."""

from collections.abc import Iterable
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.errors import ModelError
from jinfercept.models.quantized import is_quantized
from jinfercept.models.stored_weights import LazyWeight


@final
class _Kept:
    def __repr__(self) -> str:
        return "KEPT"


_NARROW = ("float8_", "float6_", "float4_", "int4", "uint4", "int2", "uint2")
"""Dtypes, by the beginnings of their names, that JAX casts to no other by itself: without their scales they are no weights."""
KEPT: Final = _Kept()
"""In place of a new weight: the served one stays."""


def made(weights: Any) -> Any:
    """A tree of weights whose lazy ones are made."""
    return jax.tree.map(lambda leaf: leaf.make() if isinstance(leaf, LazyWeight) else leaf, weights)


def check_leaf(name: str, leaf: Any, kinds: tuple[type, ...]) -> None:
    """Raise `ModelError` unless a weight is an array of these kinds of numbers that exists, without a mask."""
    fix = "give a numpy or JAX array of floating-point numbers, of 16 bits or more"
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        raise ModelError(f"weight {name} is not an array", got=type(leaf).__name__, fix=fix)
    narrow = leaf.dtype.name.startswith(_NARROW)
    if narrow or not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
        raise ModelError(f"weight {name} has an unsupported dtype", got=leaf.dtype, fix=fix)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ModelError(
            f"weight {name} was deleted", got="an array that was deleted or donated", fix="give the new one"
        )


def dotted(path: Iterable[Any]) -> str:
    """A leaf's name, of its path as JAX has it."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def by_name(weights: Any) -> dict[str, Any]:
    """The leaves of a tree by their names; quantised weights are leaves."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_quantized)[0]}
