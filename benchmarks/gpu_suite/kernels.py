"""What kernels reach by themselves on a GPU, against the ceilings of this device: paged attention, and products with the
weights of experts.

Attention by every kernel of ours (rows: `kernel_timing`); FlashInfer's beside it: `flashinfer_peer`. Products by the
grouped Triton kernel, XLA's `ragged_dot`, and JAX's own Mosaic kernel (rows: `kernel_timing`). The Mosaic kernel
(`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, Hopper) reads experts without rows, too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_suite.products import random_weight
from benchmarks.suite.kernel_timing import Candidate, Measure, attention_rows, expert_rows, time_paged
from benchmarks.suite.sizes import AttentionCase, ExpertsCase, Row, Sizes
from jinfercept.models.attention import available, cut_for, paged_attention
from jinfercept.models.checkpoint import Packing
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.pallas import triton_grouped
from jinfercept.pallas.layouts.pages import KVPages
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.tiles import HOPPER, Heads, compute_capability


def attention(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit."""
    return attention_rows(sizes, sizes.attention, partial(_attends, sizes))


def _attends(sizes: Sizes, pages: KVPages, case: AttentionCase) -> dict[str, Measure]:
    heads = Heads(case.heads.query, case.heads.kv, case.heads.dim, jnp.dtype(sizes.dtype).itemsize)
    scoring = Scoring(case.window)

    def measure(name: str) -> Measure:
        attend = partial(paged_attention, scoring=scoring, implementation=name, decode_only=case.chunk == 1)
        return partial(time_paged, attend, cut_for(heads, name), pages)

    return {
        name: measure(name)
        for name in available(sizes.dtype, sizes.dtype, heads, sizes.page_size)
        if name != "mosaic" or case.chunk > 1  # which decodes by the Triton kernels
    }


PACKINGS = {"mxfp4": Packing("uint32", 32, "uint8"), "int8": Packing("int8", 32)}


def experts(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases of products with the weights of experts."""
    return expert_rows(sizes, _products)


def _products(case: ExpertsCase, stack: jax.Array) -> dict[str, Candidate]:
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
