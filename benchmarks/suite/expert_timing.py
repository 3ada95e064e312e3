"""Times products with the weights of experts, by any implementation, beside XLA's `ragged_dot`.

Rows: `model`, `tokens`, `used` experts, `implementation`, `seconds` and its extremes, `bytes_per_s` (weights of these experts,
read once) and `copy_share` of the copy bandwidth, `flops_per_s` and `matmul_share`; `off`, the largest difference from XLA's
product with the same numbers as a share of the largest number; or `error` in place of all that. Rows of our kernel have `ok`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.sizes import ExpertsCase, Row, Sizes
from benchmarks.suite.timing import copy_rate, matmul_rate, timed
from jinfercept.models.quantized import QuantizedTensor

DTYPE = jnp.bfloat16
ERROR_CHARACTERS = 300
MOST_OFF = 0.02


class Candidate(NamedTuple):
    """An implementation: a stack of weights, and a product of rows with it; whether it is ours."""

    weight: Any
    multiply: Callable[..., jax.Array]
    is_ours: bool = True


def expert_rows(sizes: Sizes, candidates: Callable[[ExpertsCase, jax.Array], Mapping[str, Candidate]]) -> Iterator[Row]:
    """Measure all cases.

    Args:
        candidates: from a case and its stack of weights, by name.
    """
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    by_xla = jax.jit(jax.lax.ragged_dot)
    for case in sizes.experts:
        stack = random_stack(case)
        implementations = {**candidates(case, stack), "xla": Candidate(stack, by_xla, is_ours=False)}
        for tokens in case.tokens:
            x, group_sizes = _random_rows(case, tokens)
            used = int(np.count_nonzero(group_sizes))
            for name, (weight, multiply, is_ours) in implementations.items():
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
                    **({"ok": off < MOST_OFF} if is_ours else {}),
                }


def random_stack(case: ExpertsCase) -> jax.Array:
    """Weights of all experts."""
    shape = (case.num_experts, case.inputs, case.outputs)
    return jax.random.normal(jax.random.key(0), shape, DTYPE) * case.inputs**-0.5


def _random_rows(case: ExpertsCase, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Rows of every token's experts, which are drawn evenly, and how many rows each expert has."""
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(case.num_experts)[: case.per_token] for _ in range(tokens)])
    sizes = np.bincount(chosen.reshape(-1), minlength=case.num_experts).astype(np.int32)
    return jax.random.normal(jax.random.key(tokens), (chosen.size, case.inputs), DTYPE), jnp.asarray(sizes)


@jax.jit
def _dense(weight: Any) -> jax.Array:
    return weight.dense() if isinstance(weight, QuantizedTensor) else weight


def _off(y: jax.Array, expected: jax.Array) -> float:
    difference = jnp.max(jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)))
    return float(difference / jnp.max(jnp.abs(expected)).astype(jnp.float32))
