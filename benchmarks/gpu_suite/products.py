"""What products with quantised weights reach on a GPU beside XLA's product with a dense one, and whether they are right.

Rows: `weight` (how it is stored), `inputs`, `outputs`, `tokens`, `seconds` and its extremes, `bytes_per_s` (the stored weight,
read once) and `copy_share` of the copy bandwidth, `times` (seconds over those of XLA's product with the weight in bfloat16);
`off`, the largest difference from a product of the unpacked weight in float32 as a share of the largest number, and `ok`.
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp

from benchmarks.suite.ceilings import copy_rate
from benchmarks.suite.expert_timing import DTYPE, MOST_OFF
from benchmarks.suite.sizes import Row, Sizes
from benchmarks.suite.timing import timed
from jinfercept.models.packed_rows import Packing
from jinfercept.models.quantized import QuantizedTensor

PACKINGS = {
    "4 bits, groups of 32, offsets (GGUF Q4_1)": Packing("uint32", 32, offset=True),
    "4 bits, groups of 128 (GPTQ, AWQ)": Packing("uint32", 128, zero=8),
    "8 bits, groups of 32 (GGUF Q8_0)": Packing("int8", 32),
    "e4m3 (FP8)": Packing("float8_e4m3fn", 128, "float32"),
    "MXFP4": Packing("uint32", 32, "uint8"),
}
UNCACHED_BYTES = 200 << 20
"""Of copies of a weight that are read in turns: more than a GPU's cache."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all ways of storing, for all numbers of tokens."""
    copy, (inputs, outputs) = copy_rate(sizes), sizes.product
    dense = jax.random.normal(jax.random.key(0), (inputs, outputs), DTYPE) * inputs**-0.5
    by_xla, by_ours = jax.jit(jnp.dot), jax.jit(lambda x, weight: weight.product(x))
    for tokens in sizes.product_tokens:
        x = jax.random.normal(jax.random.key(tokens), (tokens, inputs), DTYPE)
        base = timed(partial(by_xla, x, dense), sizes.enough_s)
        common = {"inputs": inputs, "outputs": outputs, "tokens": tokens}
        for name, weight, timing in [
            ("bfloat16", dense, base),
            *((name, random_weight((inputs, outputs), how), None) for name, how in PACKINGS.items()),
        ]:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
            copies = cycle([weight, *(copied(weight) for _ in range(UNCACHED_BYTES // num_bytes))])
            timing = timing or timed(lambda x=x, copies=copies: by_ours(x, next(copies)), sizes.enough_s)
            row = {"weight": name, **common, "seconds": timing.seconds, "fastest_s": timing.fastest_s}
            row |= {"slowest_s": timing.slowest_s, "bytes_per_s": num_bytes / timing.seconds}
            row |= {"copy_share": num_bytes / timing.seconds / copy, "times": timing.seconds / base.seconds}
            if isinstance(weight, QuantizedTensor):
                off = _off(by_ours(x, weight), _exact(x, weight))
                row |= {"off": off, "ok": off < MOST_OFF}
            yield row


def copied(weight: QuantizedTensor) -> QuantizedTensor:
    """The same weight in other memory."""
    return jax.tree.map(jnp.copy, weight)


def random_weight(shape: tuple[int, int], how: Packing, stack: tuple[int, ...] = ()) -> QuantizedTensor:
    """A weight, or a stack of them, of random stored numbers."""
    key = jax.random.key(0)

    def drawn(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if struct.dtype == jnp.uint8:  # exponents
            return jax.random.randint(key, struct.shape, 118, 122).astype(jnp.uint8)
        if struct.dtype.itemsize == 1 and jnp.issubdtype(struct.dtype, jnp.floating):
            return jax.random.normal(key, struct.shape).astype(struct.dtype)
        if jnp.issubdtype(struct.dtype, jnp.floating):
            return jax.random.uniform(key, struct.shape, struct.dtype, 0.5, 1.5) * shape[0] ** -0.5 / 64
        return jax.lax.bitcast_convert_type(
            jax.random.bits(key, struct.shape, f"uint{struct.dtype.itemsize * 8}"), struct.dtype
        )

    return jax.tree.map(jax.jit(drawn, static_argnums=0), QuantizedTensor.of_shape(shape, 1, how, DTYPE, stack))


@jax.jit
def _exact(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    """The product of the unpacked weight, whose numbers are those that a kernel has: rounded to the type of the rows."""
    return jnp.dot(x.astype(jnp.float32), weight.dense().astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _off(y: jax.Array, expected: jax.Array) -> float:
    return float(jnp.max(jnp.abs(y.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))
