"""What products with quantised weights reach on a GPU beside XLA's product with a dense one, and whether they are right.

`Sizes.calls` products with weights and rows of their own are one executable, so that dispatch is not what is measured.

Rows: `weight` (how it is stored), `implementation`, `inputs`, `outputs`, `tokens`, `seconds` of one product and its extremes,
`bytes_per_s` (the stored weight, read once) and `copy_share` of the copy bandwidth, `times` (seconds over those of XLA's
product with the weight in bfloat16); `off`, the largest difference from a product of the unpacked weight in float32 as a share
of the largest number, and `ok`. Or `error`, or `skipped` with the reason, in place of all that.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu_suite import fragment_product
from benchmarks.suite.kernel_timing import DTYPE, ERROR_CHARACTERS, MOST_OFF
from benchmarks.suite.sizes import Row, Sizes
from benchmarks.suite.timing import copy_rate, timed
from jinfercept.models.checkpoint import Packing
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.pallas.tiles import HOPPER, compute_capability

PACKINGS = {
    "4 bits, groups of 32, offsets (GGUF Q4_1)": Packing("uint32", 32, offset=True),
    "4 bits, groups of 128 (GPTQ, AWQ)": Packing("uint32", 128, zero=8),
    "8 bits, groups of 32 (GGUF Q8_0)": Packing("int8", 32),
    "e4m3 (FP8)": Packing("float8_e4m3fn", 128, "float32"),
    "MXFP4": Packing("uint32", 32, "uint8"),
}
FOR_HOPPER = ("mosaic", "fragments")
"""Implementations that run nowhere else: JAX's kernel, and ours of `fragment_product`."""
GROUP = 128
FUSED = {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True, "xla_gpu_experimental_force_split_k": 1}
"""XLA fuses scales of groups into a product only with the first, and into one that it has not split only."""


class Candidate(NamedTuple):
    """An implementation of a product.

    Attributes:
        weight: how the weight is stored.
        implementation: its name.
        make: the weight.
        multiply: rows with it.
        dense: the numbers that it stands for, `[inputs, outputs]`.
        options: of XLA.
    """

    weight: str
    implementation: str
    make: Callable[[], Any]
    multiply: Callable[[jax.Array, Any], jax.Array]
    dense: Callable[[Any], jax.Array]
    options: Mapping[str, Any] = MappingProxyType({})


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all implementations, for all numbers of tokens."""
    copy, (inputs, outputs) = copy_rate(sizes), sizes.product
    for tokens in sizes.product_tokens:
        keys = jax.random.split(jax.random.key(tokens), sizes.calls)
        xs = [jax.random.normal(key, (tokens, inputs), DTYPE) for key in keys]
        common = {"inputs": inputs, "outputs": outputs, "tokens": tokens}
        base_s = 0.0
        for candidate in _candidates(sizes.product):
            row = {"weight": candidate.weight, "implementation": candidate.implementation, **common}
            if candidate.implementation in FOR_HOPPER and not _is_hopper():
                yield row | {"skipped": "needs a Hopper"}
                continue
            try:
                measured, base_s = _measured(candidate, xs, sizes, base_s)
            except Exception as error:  # a peer may refuse a shape, and a tile may not fit
                yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
            else:
                yield row | measured | {"copy_share": measured["bytes_per_s"] / copy}


def _measured(candidate: Candidate, xs: list[jax.Array], sizes: Sizes, base_s: float) -> tuple[Row, float]:
    """What a row says, and the seconds of the first candidate."""
    weight = candidate.make()
    weights = [weight, *(copied(weight) for _ in xs[1:])]

    def multiply(xs: list[jax.Array], weights: list[Any]) -> list[jax.Array]:
        outs: list[jax.Array] = []
        for x, each in zip(xs, weights, strict=True):
            after, _ = jax.lax.optimization_barrier((x, outs[-1:]))
            outs.append(candidate.multiply(after, each))
        return outs

    run = jax.jit(multiply).lower(xs, weights).compile(compiler_options=dict(candidate.options))
    timing = timed(partial(run, xs, weights), sizes.enough_s)
    num_bytes = sum(leaf.size * _bits(leaf) // 8 for leaf in jax.tree.leaves(weight))
    seconds = timing.seconds / len(xs)
    base_s = base_s or seconds
    off = _off(run(xs, weights)[0], _exact(xs[0], jax.jit(candidate.dense)(weight)))
    row = {"seconds": seconds, "fastest_s": timing.fastest_s / len(xs), "slowest_s": timing.slowest_s / len(xs)}
    return row | {
        "bytes_per_s": num_bytes / seconds,
        "times": seconds / base_s,
        "off": off,
        "ok": off < MOST_OFF,
    }, base_s


def _candidates(shape: tuple[int, int]) -> Iterator[Candidate]:
    """XLA's product with a dense weight, and after it all others."""
    inputs, on_gpu = shape[0], jax.default_backend() == "gpu"

    def dense() -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, DTYPE) * inputs**-0.5

    yield Candidate("bfloat16", "xla", dense, jnp.dot, lambda weight: weight)
    for name, how in PACKINGS.items():
        make = partial(random_weight, shape, how)
        yield Candidate(name, "jinfercept", make, lambda x, weight: weight.product(x), QuantizedTensor.dense)
    for kind in ("int4", "int8", "float8_e4m3fn"):
        for options, depth in (({}, inputs), (FUSED if on_gpu else {}, min(GROUP, inputs // 2))):
            name = f"{kind}, {'a scale for each column' if depth == inputs else f'groups of {depth}'}"
            make = partial(_plain, shape, kind, depth)
            yield Candidate(name, "xla", make, _by_xla, _plain_dense, options)
            multiply = partial(fragment_product.product, kind=kind)
            yield Candidate(
                name, "fragments", partial(_arranged, make), multiply, lambda _, make=make: _plain_dense(make())
            )
    make = partial(_plain, shape, "int8", inputs)
    yield Candidate(
        "int8, a scale for each column, outputs first",
        "mosaic",
        lambda: _turned(make()),
        _by_mosaic,
        lambda weight: _plain_dense((weight[0].T, weight[1])),
    )


def _plain(shape: tuple[int, int], kind: str, depth: int) -> tuple[jax.Array, jax.Array]:
    """Numbers `[inputs, outputs]` and scales `[groups, outputs]`, as XLA takes them."""
    drawn, scaled = jax.random.split(jax.random.key(0))
    numbers = jnp.round(jax.random.uniform(drawn, shape, minval=-7, maxval=7)).astype(kind)
    return numbers, jax.random.uniform(scaled, (shape[0] // depth, shape[1]), DTYPE, 0.5, 1.5) * shape[0] ** -0.5 / 8


def _plain_dense(weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    numbers, scales = weight
    wide = numbers.reshape(len(scales), -1, scales.shape[1]).astype(DTYPE) * scales[:, None]
    return wide.reshape(numbers.shape)


def _by_xla(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    numbers, scales = weight
    if len(scales) > 1:
        return jnp.dot(x, _plain_dense(weight))
    return (jnp.dot(x, numbers.astype(x.dtype), preferred_element_type=jnp.float32) * scales).astype(x.dtype)


def _arranged(make: Callable[[], tuple[jax.Array, jax.Array]]) -> fragment_product.Fragments:
    return fragment_product.arrange(*make())


def _is_hopper() -> bool:
    return jax.default_backend() == "gpu" and compute_capability() == HOPPER


def _turned(weight: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return weight[0].T, weight[1]


def _by_mosaic(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """JAX's kernel, whose first operand is the quantised one: the product's transpose. It wants at least 16 rows."""
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as mixed

    numbers, scales = weight
    most = min(128, max(16, 1 << (len(x) - 1).bit_length()))
    padded = jnp.pad(x, ((0, -len(x) % most), (0, 0)))
    config = mixed.TuningConfig(
        64, most, 128, 4, min(64, most), 64, mixed.MatmulDimension.M, 1, mixed.MatmulDimension.M
    )
    y = mixed.mixed_matmul_kernel(numbers, padded.T, out_dtype=jnp.bfloat16, config=config)
    return (y.T[: len(x)] * scales).astype(x.dtype)


def copied(weight: Any) -> Any:
    """The same weight in other memory."""
    return jax.tree.map(jnp.copy, weight)


def _bits(array: jax.Array) -> int:
    return 4 if array.dtype == jnp.int4 else 8 * array.dtype.itemsize


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
def _exact(x: jax.Array, dense: jax.Array) -> jax.Array:
    """The product of the unpacked weight, whose numbers are those that a kernel has: rounded to the type of the rows."""
    return jnp.dot(x.astype(jnp.float32), dense.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _off(y: jax.Array, expected: jax.Array) -> float:
    return float(jnp.max(jnp.abs(y.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))
