"""Operands of the Triton kernels: whole arrays, and whole numbers that may be parts of a packed vector."""

from functools import partial
from math import prod

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jinfercept.pallas.layouts.pages import Ints, VectorPart

EVERYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def with_ints(arrays: tuple[Array, ...], *ints: Ints) -> tuple[list[Array], list[pl.BlockSpec]]:
    """A kernel's operands and their places: arrays, then whole numbers, which kernels see in one dimension."""
    operands, specs = list(arrays), [EVERYWHERE] * len(arrays)
    for numbers in ints:
        if isinstance(numbers, VectorPart):
            operands.append(numbers.vector)
            specs.append(pl.BlockSpec((pl.Element(prod(numbers.shape)),), partial(_place, numbers.first)))
        else:
            operands.append(jnp.reshape(numbers, -1))
            specs.append(EVERYWHERE)
    return operands, specs


def _place(first: int, *_: Array) -> tuple[int]:
    return (first,)
