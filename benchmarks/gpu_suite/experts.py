"""What products with the weights of experts reach on a GPU: the grouped Triton kernel, XLA's `ragged_dot`, and JAX's own Mosaic
kernel; the rows are those of `expert_timing`.

The Mosaic kernel (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, Hopper) reads experts without rows, too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

from benchmarks.gpu_suite.products import random_weight
from benchmarks.suite.expert_timing import Candidate, expert_rows
from benchmarks.suite.sizes import ExpertsCase, Row, Sizes
from jinfercept.models.packed_rows import Packing
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.pallas import triton_grouped
from jinfercept.pallas.gpu_heads import compute_capability
from jinfercept.pallas.tiles import HOPPER

PACKINGS = {"mxfp4": Packing("uint32", 32, "uint8"), "int8": Packing("int8", 32)}


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases."""
    return expert_rows(sizes, _candidates)


def _candidates(case: ExpertsCase, stack: jax.Array) -> dict[str, Candidate]:
    by_triton = jax.jit(partial(_by_triton, case))
    packed = {
        f"triton {name}": Candidate(random_weight((case.inputs, case.outputs), how, (case.num_experts,)), by_triton)
        for name, how in PACKINGS.items()
    }
    candidates = {"triton": Candidate(stack, by_triton), **packed}
    if jax.default_backend() == "gpu" and compute_capability() == HOPPER:
        candidates["mosaic"] = Candidate(stack, jax.jit(_by_mosaic), is_ours=False)
    return candidates


def _by_triton(case: ExpertsCase, x: jax.Array, stack: Any, group_sizes: jax.Array) -> jax.Array:
    quantised = isinstance(stack, QuantizedTensor)
    tile = triton_grouped.tile_rows(len(x), case.num_experts, quantised=quantised)
    tiles = triton_grouped.row_tiles(group_sizes, len(x), tile)
    return triton_grouped.product(
        x, tiles, stack.packed if quantised else stack, interpret=jax.default_backend() != "gpu"
    )


def _by_mosaic(x: jax.Array, stack: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    columns = 128 if stack.shape[2] % 128 == 0 else 64
    return ragged_dot(
        x,
        stack,
        group_sizes=group_sizes,
        block_m=64,
        block_n=columns,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=1,
    )
