"""Shapes of pages and states, and the executables that gather pages for the host and scatter them back.

Transfers of pages have a few static sizes. The states of a sequence in all recurrent layers cross the link as one array for
each dtype, in which the parts of the layers follow each other. Each of several devices moves its own parts.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Num

from jinfercept.models.mesh import EVERYWHERE, Placed, beside, over_devices, specs_of
from jinfercept.models.parallel import AXIS
from jinfercept.pallas.layouts.interleaved import FP8, INTERLEAVED_ON, interleaved_shape, is_interleaved
from jinfercept.pallas.layouts.kv_rows import STORED
from jinfercept.pallas.layouts.pages import KVPages, Scalar, from_words, kv_shape, to_words
from jinfercept.pallas.layouts.states import StateArray
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import CommonShape

HostPages = Num[Array, "k l B *sides heads W"]
"""Several pages of all layers."""
KeptPages = Num[Array | np.ndarray, "k l B *sides heads W"] | tuple[Num[Array | np.ndarray, "_"], ...]
"""The same, or a sequence's states, an array for each dtype; NumPy has those that are in pageable memory."""
type States = tuple[tuple[StateArray, ...], ...]
"""The state of every layer of a model, see `protocol.states_of`; () for layers that have none."""


def heads_spec(ndim: int) -> PartitionSpec:
    """Several devices cut pages, and arrays of pages on the link, by KV head: the last axis but one."""
    return PartitionSpec(*(None,) * (ndim - 2), AXIS)


def layer_pages(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, home: Sharding
) -> jax.ShapeDtypeStruct:
    """The shape of one layer's pages.

    Args:
        num_pages: includes the scratch page.
        num_kv_heads, head_dim: of the model, on all devices.
        dtype: see `kv_rows.stored_dtype`; on TPUs `FP8` takes the place of its type for fp8.
        home: a placement on the devices; the axes that they cut are set here.
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
    """Shapes with shardings of every recurrent layer's states, in their own dtype or in that of `like`, and beside it.
    `num_slots` does not count the slot that is no sequence's."""

    def struct(array: StateArray) -> jax.ShapeDtypeStruct:
        dtype: DTypeLike = array.dtype or like.dtype
        cut = () if array.cut_axis is None else (*(None,) * (1 + array.cut_axis), AXIS)
        sharding = beside(like, PartitionSpec(*cut))
        return jax.ShapeDtypeStruct((num_slots + 1, *array.shape), dtype, sharding=sharding)

    return tuple(tuple(map(struct, of_layer)) for of_layer in states if of_layer)


def slot_bytes(states: States, dtype: DTypeLike, num_devices: int = 1) -> int:
    """Bytes of one sequence's states over all layers, on each of the devices. `dtype` is that of the weights."""

    def num_bytes(array: StateArray) -> int:
        parts = 1 if array.cut_axis is None else num_devices
        return math.prod(array.shape) * jnp.dtype(array.dtype or dtype).itemsize // parts

    return sum(num_bytes(array) for of_layer in states for array in of_layer)


CPU_TRANSFERS = (16, 4, 1)
GPU_TRANSFERS = (32, 8, 1)
"""Pages per gather or scatter of whole pages, largest first.

The GPU runtime of JAX lets 32 executables wait, then dispatch blocks. The memory plan moves at most 1 GiB a step, 512 pages of
2 MiB (Llama-3-8B, page 16): with whole pages these are at most 17 gathers and scatters together, which leaves 15 for the
embedding, the groups of layers, the head and the sampler.
"""
GPU_STAGED = 128
"""Pages per gather or scatter of arrays of several pages. On an H100, steps of Llama-3-8B that sent 240 pages in gathers of 32
took 1.69 times as long as steps without, in gathers of 128 1.14 times (`benchmarks/gpu/`)."""


def transfer_sizes(platform: str, staging_pages: int = 1) -> tuple[int, ...]:
    """Pages per gather or scatter, largest first. With staging they include every power of two up to an array's pages."""
    if staging_pages == 1:
        return CPU_TRANSFERS if platform == "cpu" else GPU_TRANSFERS
    powers = {1 << exponent for exponent in range(staging_pages.bit_length())}
    widest = CPU_TRANSFERS[0] if platform == "cpu" else GPU_STAGED
    return tuple(sorted(powers | {max(widest, staging_pages)}, reverse=True))


def _gather(staging: int, layers: tuple[KVPages, ...], slots: Int[Array, "slots"]) -> tuple[HostPages, ...]:
    def gather(layers: tuple[Array, ...], slots: Int[Array, "k"]) -> tuple[Array, ...]:
        # padding reads any page
        pages = jnp.stack([layer.at[slots].get(mode="clip") for layer in layers], axis=1)
        return tuple(pages[first : first + staging] for first in range(0, slots.shape[0], staging))

    def gather_words(layers: tuple[KVPages, ...], slots: Int[Array, "slots"]) -> tuple[HostPages, ...]:
        shape = (staging, len(layers), *layers[0].shape[1:])
        return tuple(from_words(pages, layers[0], shape) for pages in gather(tuple(map(to_words, layers)), slots))

    if is_interleaved(layers[0]):
        return gather(layers, slots)
    return jax.lax.platform_dependent(layers, slots, cpu=gather, default=gather_words)


def _scatter(
    layers: tuple[KVPages, ...], slots: Int[Array, "slots"], arrays: tuple[HostPages, ...]
) -> tuple[KVPages, ...]:
    if is_interleaved(layers[0]):
        return _scatter_pages(layers, slots, arrays)
    return jax.lax.platform_dependent(layers, slots, arrays, cpu=_scatter_pages, default=_scatter_words)


def _scatter_pages(layers: tuple[Array, ...], slots: Int[Array, "k"], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    pages = jnp.concatenate(arrays)
    if slots.shape[0] == 1:  # never padding; a scatter of one row is a read, a selection and a write
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(layer, pages[:, i], slots[0], 0) for i, layer in enumerate(layers)
        )
    return tuple(layer.at[slots].set(pages[:, i], unique_indices=True, mode="drop") for i, layer in enumerate(layers))


def _scatter_words(
    layers: tuple[KVPages, ...], slots: Int[Array, "slots"], arrays: tuple[HostPages, ...]
) -> tuple[KVPages, ...]:
    words = tuple(to_words(pages.reshape(-1, *pages.shape[2:])).reshape(*pages.shape[:2], -1) for pages in arrays)
    written = _scatter_pages(tuple(map(to_words, layers)), slots, words)
    return tuple(from_words(words, layer, layer.shape) for words, layer in zip(written, layers, strict=True))


def _select(pages: HostPages, slots: Int[Array, "fewer"]) -> Num[Array, "fewer l B *sides heads W"]:
    return pages.at[slots].get(mode="clip")


def _gather_states(
    layers: tuple[tuple[Num[Array, "N ..."], ...], ...], slots: Int[Array, "1"]
) -> tuple[tuple[Num[Array, "_"], ...]]:
    [slot] = slots
    parts: dict[Any, list[Array]] = {}
    for array in chain.from_iterable(layers):
        parts.setdefault(array.dtype, []).append(jax.lax.dynamic_index_in_dim(array, slot, keepdims=False).reshape(-1))
    return (tuple(map(jnp.concatenate, parts.values())),)


def _scatter_states(
    layers: tuple[tuple[Num[Array, "N ..."], ...], ...],
    slots: Int[Array, "1"],
    arrays: tuple[tuple[Num[Array, "_"], ...]],
) -> tuple[tuple[Num[Array, "N ..."], ...], ...]:
    [slot], [state] = slots, arrays
    joined, places = {part.dtype: part for part in state}, {part.dtype: 0 for part in state}

    def written(array: Array) -> Array:
        first, size = places[array.dtype], prod(array.shape[1:])
        places[array.dtype] += size
        part = joined[array.dtype][first : first + size].reshape(array.shape[1:])
        return jax.lax.dynamic_update_index_in_dim(array, part, slot, 0)

    return tuple(tuple(map(written, of_layer)) for of_layer in layers)


def _on_slots(common_shape: CommonShape, size: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(layers: Any, common: Int[Array, "common"], transfer: Scalar, *arrays: Any) -> Any:
        return function(layers, common_shape.slots(common, transfer, size), *arrays)

    return run


def on_link(layer: Any) -> Sharding:
    """How several devices cut the arrays of a layer's pages or states that cross the link. `layer` has arrays or shapes."""
    first = layer[0] if isinstance(layer, tuple) else layer
    return beside(first, PartitionSpec(AXIS) if isinstance(layer, tuple) else heads_spec(first.ndim + 1))


def add_transfers(
    run: Executables, layers: tuple[Any, ...], sizes: Sequence[int], staging_pages: int, common_shape: CommonShape
) -> None:
    """Add the transfers' executables to `run`, with `transfer_sizes` for pages and (1,) for states. `layers` has arrays, or
    shapes with shardings."""
    is_states, placed, home = isinstance(layers[0], tuple), on_link(layers[0]), beside(jax.tree.leaves(layers)[0])
    common = jax.ShapeDtypeStruct((common_shape.size,), jnp.int32, sharding=home)
    reads = common, jax.ShapeDtypeStruct((), jnp.int32, sharding=home)
    out = getattr(placed, "spec", EVERYWHERE)

    def struct(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=placed)

    for size in sizes:
        pages = min(size, staging_pages)
        gather: Any = _gather_states if is_states else partial(_gather, pages)
        gather = over_devices(_on_slots(common_shape, size, gather), (layers, *reads), out)
        if is_states:
            arrays = jax.tree.map(
                lambda array: struct(array.shape, array.dtype), jax.eval_shape(gather, layers, *reads)
            )
        else:
            arrays = (struct((pages, len(layers), *layers[0].shape[1:]), layers[0].dtype),) * (size // pages)
        scatter = _on_slots(common_shape, size, _scatter_states if is_states else _scatter)
        scatter = over_devices(scatter, (layers, *reads, arrays), specs_of(layers))
        run.add(("gather", size), gather, layers, *reads)
        run.add(("scatter", size), scatter, layers, *reads, arrays, donate=(0,))
        for fewer in (fewer for fewer in sizes if fewer < size <= staging_pages):
            select = over_devices(_on_slots(common_shape, fewer, _select), (arrays[0], *reads), out)
            run.add(("select", fewer, size), select, arrays[0], *reads)
