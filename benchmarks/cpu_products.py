"""Products of the embedded model on a CPU: their times by number of rows and type of the weight, beside the memory's bandwidth.

The weights of a measurement are many, so that none is in a cache when its turn comes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jinfercept.cpu_kernels import dense_product, native
from jinfercept.cpu_kernels.code import F32, Code, Value
from jinfercept.layouts.packed_weights import Packed, pack
from jinfercept.pallas.quantized_product import product

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
"""Inputs and outputs: queries, keys and values; output of attention; gate and up; down; logits."""
ROWS = (1, 8, 32)
ROTATED_BYTES = 256 << 20
AT_ONCE = 32
"""Products in one call of an executable."""
REPEATS = 3
GROUP = 32
type Multiply = Callable[[jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class _Kind:
    """A way to multiply.

    Attributes:
        name: in the table.
        dtype: of the rows.
        bits: of a number of the weight.
        multiply: rows by a weight.
    """

    name: str
    dtype: str
    bits: int
    multiply: Multiply

    def weight(self, depth: int, columns: int, seed: int) -> Any:
        """A random weight."""
        key = jax.random.key(seed)
        if self.bits > 8:
            return jax.random.normal(key, (depth, columns), jnp.dtype(self.dtype))
        q = jax.random.randint(key, (depth, columns), 0, 16)
        scales = jax.random.normal(key, (depth // GROUP, columns), jnp.float16)
        if self.bits == 4:
            return tuple(pack(q, scales, scales, bits=4)[:3])
        return tuple(pack(q.astype(jnp.int8), scales, bits=8)[:3])


def _by_xla(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.dot(x, weight, precision="highest")


def _bfloat16(x: jax.Array, weight: jax.Array) -> jax.Array:
    return dense_product.product(x, weight, transposed=False, out=x.dtype)


def _quantized(
    x: jax.Array, weight: tuple[jax.Array, jax.Array, jax.Array | None], *, int8_rows: bool = False
) -> jax.Array:
    values, scales, offsets = weight
    return product(x, Packed(values, scales, offsets), x.dtype, int8_rows=int8_rows)


_int8 = partial(_quantized, int8_rows=True)


KINDS = (
    _Kind("float32", "float32", 32, _by_xla),
    _Kind("bfloat16", "bfloat16", 16, _bfloat16),
    _Kind("8 bits, float32 rows", "float32", 8, _quantized),
    _Kind("8 bits, bfloat16 rows", "bfloat16", 8, _quantized),
    _Kind("8 bits, int8 rows", "bfloat16", 8, _int8),
    _Kind("4 bits, float32 rows", "float32", 4, _quantized),
    _Kind("4 bits, bfloat16 rows", "bfloat16", 4, _quantized),
    _Kind("4 bits, int8 rows", "bfloat16", 4, _int8),
)


def measure(rows: Sequence[int] = ROWS, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    """Print the table."""
    table = Table(
        title=f"microseconds a product; in brackets GB/s, of {bandwidth() / 1e9:.1f} that reading alone reaches"
    )
    for column in ("inputs x outputs", "rows", *(kind.name for kind in KINDS)):
        table.add_column(column, justify="right")
    for shape in shapes:
        measured = [_times(kind, *shape, rows) for kind in KINDS]
        for place, count in enumerate(rows):
            cells = [f"{1e6 * times[place][0]:,.0f} ({times[place][1] / 1e9:.1f})" for times in measured]
            table.add_row(f"{shape[0]} x {shape[1]}", str(count), *cells)
    Console(width=200).print(table)


def _times(kind: _Kind, depth: int, columns: int, rows: Sequence[int]) -> list[tuple[float, float]]:
    """For each number of rows, seconds of a product and bytes of the weight in a second."""
    weight = kind.weight(depth, columns, 0)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(weight))
    at_once = min(AT_ONCE, max(1, ROTATED_BYTES // num_bytes))
    copied = jax.jit(lambda weight: [jax.tree.map(jnp.copy, weight) for _ in range(at_once)])
    rotated = [copied(weight) for _ in range(max(1, ROTATED_BYTES // num_bytes // at_once))]

    @jax.jit
    def chain(x: jax.Array, weights: list[Any]) -> jax.Array:
        for weight in weights:
            y = kind.multiply(x, weight)
            x = x.at[0, 0].add((y[::32, -1].sum() * 1e-30).astype(x.dtype))
        return x

    result = list[tuple[float, float]]()
    for count in rows:
        x = jax.random.normal(jax.random.key(1), (count, depth), jnp.dtype(kind.dtype))
        chain(x, rotated[0]).block_until_ready()
        seconds = _best(lambda x=x: [chain(x, weights) for weights in rotated][-1]) / len(rotated) / at_once
        result.append((seconds, num_bytes / seconds))
    return result


def _best(run: Callable[[], jax.Array]) -> float:
    """The fewest seconds of several runs."""
    times = list[float]()
    for _ in range(REPEATS):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class _Read:
    """Reads an array of float32 in items of 256 KiB; the result has a number of each."""

    numbers: int = 1 << 16

    def num_items(self, code: Code) -> Value:
        return code.dim(0, 0) // self.numbers

    def item(self, code: Code, index: Value) -> None:
        lanes, numbers = native.lanes(), code.arg(0, F32)
        sums = code.sums(8, lanes)
        with code.loop(index * self.numbers, (index + 1) * self.numbers, 8 * lanes) as place:
            for part, total in enumerate(sums):
                total.value = total.value + numbers.vector(place + part * lanes, lanes)
        code.ret(0, F32)[index] = code.folded([total.value for total in sums], Value.__add__)


def bandwidth() -> float:
    """Bytes in a second that all threads read from memory together."""
    kernel = _Read()
    numbers = jnp.ones(ROTATED_BYTES // 4)
    result = jax.ShapeDtypeStruct((len(numbers) // kernel.numbers,), jnp.float32)
    read = jax.jit(lambda numbers: native.call(kernel, result, numbers))
    read(numbers).block_until_ready()
    return numbers.nbytes / _best(lambda: read(numbers))
