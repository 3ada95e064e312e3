"""The shapes of one layer's pages, and of recurrent layers' states, on their devices, and how several devices cut them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from jinfercept.layouts.interleaved import FP8, INTERLEAVED_ON, interleaved_shape
from jinfercept.layouts.kv_rows import STORED
from jinfercept.layouts.pages import kv_shape
from jinfercept.layouts.states import StateArray
from jinfercept.models.mesh import Placed, beside
from jinfercept.models.parallel import AXIS

HostPages = Num[Array, "k l B *sides heads W"]
"""Several pages of all layers."""
KeptPages = Num[Array | np.ndarray, "k l B *sides heads W"] | tuple[Num[Array | np.ndarray, "_"], ...]
"""The same, or a sequence's states, an array for each dtype; NumPy has those that are in pageable memory."""
type States = tuple[tuple[StateArray, ...], ...]
"""The state of every layer of a model, see `protocol.states_of`; () for layers that have none."""


def heads_spec(ndim: int) -> PartitionSpec:
    """Several devices cut pages, and the arrays of pages that cross the link, by KV head: the last axis but one."""
    return PartitionSpec(*(None,) * (ndim - 2), AXIS)


def layer_pages(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, home: Sharding
) -> jax.ShapeDtypeStruct:
    """The shape of one layer's pages.

    Args:
        num_pages: the scratch page too.
        num_kv_heads, head_dim: of the model, on all devices.
        dtype: of the page arrays, see `kv_rows.stored_dtype`; those of a TPU have `FP8` in the place of its type of fp8.
        home: a placement on the devices where they lie; which of their axes are cut is set here.
    """
    devices = tuple(home.device_set)
    if devices[0].platform in INTERLEAVED_ON:
        dtype = FP8 if dtype == STORED["fp8"] else dtype
        shape = interleaved_shape(num_pages, page_size, num_kv_heads, head_dim, dtype, len(devices))
    else:
        shape = kv_shape(num_pages, page_size, num_kv_heads, head_dim, dtype)
    if isinstance(home, NamedSharding) and len(devices) > 1:
        home = NamedSharding(home.mesh, heads_spec(len(shape)), memory_kind=home.memory_kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=home)


def state_shapes(states: States, num_slots: int, like: Placed) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """The arrays of every recurrent layer's states, with their places.

    Args:
        num_slots: without the one that is no sequence's.
        like: an array with the dtype of the weights, on their devices.
    """

    def struct(array: StateArray) -> jax.ShapeDtypeStruct:
        dtype: DTypeLike = array.dtype or like.dtype
        cut = () if array.cut_axis is None else (*(None,) * (1 + array.cut_axis), AXIS)
        sharding = beside(like, PartitionSpec(*cut))
        return jax.ShapeDtypeStruct((num_slots + 1, *array.shape), dtype, sharding=sharding)

    return tuple(tuple(map(struct, of_layer)) for of_layer in states if of_layer)


def slot_bytes(states: States, dtype: DTypeLike, num_devices: int = 1) -> int:
    """Bytes of one sequence's states over all layers, on each of the devices.

    Args:
        dtype: of the weights.
    """

    def num_bytes(array: StateArray) -> int:
        parts = 1 if array.cut_axis is None else num_devices
        return math.prod(array.shape) * jnp.dtype(array.dtype or dtype).itemsize // parts

    return sum(num_bytes(array) for of_layer in states for array in of_layer)
