"""The shape of one layer's pages on its devices: how they lie there, and how several devices cut them."""

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jinfercept.layouts.interleaved import FP8, INTERLEAVED_ON, interleaved_shape
from jinfercept.layouts.kv_rows import STORED
from jinfercept.layouts.pages import kv_shape
from jinfercept.models.parallel import AXIS


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
