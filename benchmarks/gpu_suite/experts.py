"""What products with the weights of experts reach on a GPU: the grouped Triton kernel, XLA's `ragged_dot`, and JAX's own Mosaic
kernel; the rows are those of `expert_timing`.

The Mosaic kernel (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, Hopper) reads experts without rows, too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suite.expert_timing import DTYPE, Candidate, expert_rows
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
    packed = {f"triton {name}": Candidate(_random_packed(case, how), by_triton) for name, how in PACKINGS.items()}
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


def _random_packed(case: ExpertsCase, how: Packing) -> QuantizedTensor:
    """Quantised weights of all experts."""
    dims, key = (case.inputs, case.outputs), jax.random.key(0)

    def drawn(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if struct.dtype == jnp.uint8:
            return jax.random.randint(key, struct.shape, 118, 122).astype(jnp.uint8)
        if jnp.issubdtype(struct.dtype, jnp.floating):
            return jax.random.uniform(key, struct.shape, struct.dtype, 0.5, 1.5) * case.inputs**-0.5 / 64
        return jax.lax.bitcast_convert_type(
            jax.random.bits(key, struct.shape, f"uint{struct.dtype.itemsize * 8}"), struct.dtype
        )

    shapes = QuantizedTensor.of_shape(dims, 1, how, DTYPE, (case.num_experts,))
    return jax.tree.map(jax.jit(drawn, static_argnums=0), shapes)
