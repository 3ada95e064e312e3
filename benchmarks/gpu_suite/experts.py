"""What products with the weights of experts reach: the grouped Triton kernel, XLA's `ragged_dot`, and JAX's own Mosaic kernel.

Rows: `model`, `tokens`, `used` experts, `implementation`, `seconds` and its extremes, `bytes_per_s` (weights of these experts,
read once) and `copy_share` of the copy bandwidth, `flops_per_s` and `matmul_share`; `off`, the largest difference from XLA's
product with the same numbers as a share of the largest number; or `error` in place of all that. Rows of our kernel have `ok`.

The Mosaic kernel (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, Hopper) reads experts without rows, too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_suite.ceilings import copy_rate, matmul_rate
from benchmarks.gpu_suite.sizes import ExpertsCase, Row, Sizes
from benchmarks.gpu_suite.timing import timed
from jinfercept.models.packed_rows import Packing
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.pallas import triton_grouped
from jinfercept.pallas.gpu_heads import compute_capability
from jinfercept.pallas.tiles import HOPPER

DTYPE = jnp.bfloat16
ERROR_CHARACTERS = 300
MOST_OFF = 0.02
PACKINGS = {"mxfp4": Packing("uint32", 32, "uint8"), "int8": Packing("int8", 32)}

type Product = Callable[..., jax.Array]


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    for case in sizes.experts:
        stack = _random_stack(case, None)
        packed = {name: _random_stack(case, how) for name, how in PACKINGS.items()}
        for tokens in case.tokens:
            x, group_sizes = _random_rows(case, tokens)
            by_xla = jax.jit(jax.lax.ragged_dot)
            candidates: dict[str, tuple[Any, Product]] = {
                "triton": (stack, jax.jit(partial(_by_triton, case))),
                "xla": (stack, by_xla),
            }
            candidates |= {
                f"triton {name}": (weight, jax.jit(partial(_by_triton, case))) for name, weight in packed.items()
            }
            if jax.default_backend() == "gpu" and compute_capability() == HOPPER:
                candidates["mosaic"] = (stack, jax.jit(_by_mosaic))
            used = int(np.count_nonzero(group_sizes))
            for name, (weight, multiply) in candidates.items():
                row = {"model": case.model, "tokens": tokens, "used": used, "implementation": name}
                try:
                    timing = timed(partial(multiply, x, weight, group_sizes), sizes.enough_s)
                    off = _off(multiply(x, weight, group_sizes), by_xla(x, _dense(weight), group_sizes))
                except Exception as error:  # a peer may refuse a shape, and a kernel may fail on one
                    yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
                    continue
                num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) * used / case.num_experts
                flops = 2 * len(x) * case.inputs * case.outputs
                yield row | {
                    "seconds": timing.seconds,
                    "fastest_s": timing.fastest_s,
                    "slowest_s": timing.slowest_s,
                    "bytes_per_s": num_bytes / timing.seconds,
                    "copy_share": num_bytes / timing.seconds / copy,
                    "flops_per_s": flops / timing.seconds,
                    "matmul_share": flops / timing.seconds / matmul,
                    "off": off,
                    **({"ok": off < MOST_OFF} if name.startswith("triton") else {}),
                }


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


def _random_rows(case: ExpertsCase, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Rows of every token's experts, which are drawn evenly, and how many rows each expert has."""
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(case.num_experts)[: case.per_token] for _ in range(tokens)])
    sizes = np.bincount(chosen.reshape(-1), minlength=case.num_experts).astype(np.int32)
    return jax.random.normal(jax.random.key(tokens), (chosen.size, case.inputs), DTYPE), jnp.asarray(sizes)


def _random_stack(case: ExpertsCase, how: Packing | None) -> Any:
    """Weights of all experts, quantised or not."""
    dims, key = (case.inputs, case.outputs), jax.random.key(0)
    if how is None:
        return jax.random.normal(key, (case.num_experts, *dims), DTYPE) * case.inputs**-0.5

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


@jax.jit
def _dense(weight: Any) -> jax.Array:
    return weight.dense() if isinstance(weight, QuantizedTensor) else weight


def _off(y: jax.Array, expected: jax.Array) -> float:
    difference = jnp.max(jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)))
    return float(difference / jnp.max(jnp.abs(expected)).astype(jnp.float32))
