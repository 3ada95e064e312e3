"""Products of rows that are sorted by expert with stacks of weights, on TPUs: jax's own kernel (megablox `gmm`).

Tests compile it for TPUs ahead of time; no TPU has run it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.pallas.layouts.interleaved import LANES

MOST_TILE = (128, 2048, 512)
"""Rows, inputs and outputs that are multiplied at a time, at most: 2 MiB of weights."""
LEAST_ROWS = 16


def is_lowered_for_tpu() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "tpu"


def tpu_grouped_product(
    sizes: Int[Array, "X"], dtype: DTypeLike, shapes: list[tuple[int, ...]]
) -> Callable[[Float[Array, "N A"], Float[Array, "X A B"]], Float[Array, "N B"]] | None:
    """The product, if code is lowered for a TPU that has a kernel for it, else None. Rows of no expert may give anything.

    `sizes` are the rows of each expert, which come first; `shapes` are those of the stacks of matrices.
    """
    if not is_lowered_for_tpu() or jnp.dtype(dtype) != jnp.bfloat16:
        return None
    if any(size % LANES for shape in shapes for size in shape[1:]):
        return None
    return lambda rows, stack: product(rows, stack, sizes)


def product(
    rows: Float[Array, "N A"],
    stack: Float[Array, "X A B"],
    sizes: Int[Array, "X"],
    *,
    most: tuple[int, int, int] = MOST_TILE,
    interpret: bool = False,
) -> Float[Array, "N B"]:
    """Rows times the matrix of their expert. `most` are the rows, inputs and outputs of a tile, at most."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    _, num_inputs, num_outputs = stack.shape
    tile = tile_of(len(rows), num_inputs, num_outputs, most)
    padded = jnp.pad(rows, ((0, -len(rows) % tile[0]), (0, 0)))
    sizes = sizes.astype(jnp.int32)
    return gmm(padded, stack, sizes, preferred_element_type=rows.dtype, tiling=tile, interpret=interpret)[: len(rows)]


def tile_of(
    num_rows: int, num_inputs: int, num_outputs: int, most: tuple[int, int, int] = MOST_TILE
) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a tile."""
    rows = max(LEAST_ROWS, 1 << (num_rows - 1).bit_length())
    return min(most[0], rows), min(most[1], num_inputs), min(most[2], num_outputs)
