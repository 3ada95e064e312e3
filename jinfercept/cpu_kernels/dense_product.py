"""Products with a weight in bfloat16 as it lies: every number of the weight is read once from memory.

An item is a block of the weight's outputs. Sums are in float32. CPUs with bfloat16 dot products multiply pairs of numbers;
others widen numbers to float32 first. For few rows the weight is a stack of one expert (`grouped_product.py`), which is widened
in registers; for many, a block is widened into a buffer (`ManyRows`).
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.cpu_kernels import grouped_product, native
from jinfercept.cpu_kernels.code import BF16, F32, I8, TYPES, Buffer, Code, Operand, Value, add_products, results
from jinfercept.cpu_kernels.tiles import PAIRS, ManyRows, fits, has_pairs, tile_rows

BLOCK = 32  # numbers in a cache line, and outputs of an item of few rows
MOST_ROWS = 32
"""Of a product with a transposed weight, and of any on a CPU without bfloat16 dot products."""


def product(
    x: Float[Array, "T K"], weight: Float[Array, "..."], *, transposed: bool, out: DTypeLike
) -> Float[Array, "T N"]:
    """`x @ weight` in bfloat16, for arguments that `supports` accepts. The weight is `[K, N]`, or `[N, K]` if `transposed`."""
    lanes, pairs, kind = native.lanes(), has_pairs(), jnp.dtype(out).name
    if transposed:
        kernel = _ByRows(len(x), kind, lanes, pairs)
    elif _are_few(len(x), weight.shape[1]):
        rows = jnp.arange(len(x))
        return grouped_product.product(x, weight[None], jnp.full(1, len(x)), rows, rows, out)
    else:
        kernel = _ManyRowsByColumns(tile_rows(len(x)), kind, lanes, pairs)
        x = x if pairs else x.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(x), weight.shape[0 if transposed else 1]), out)
    return native.call(kernel, result, x, weight)


def supports(x: tuple[int, ...], weight: tuple[int, ...], *dtypes: DTypeLike, transposed: bool) -> bool:
    """Whether `product` computes this, by the shapes and types of its factors."""
    return (
        (x[0] <= MOST_ROWS or (has_pairs() and not transposed))
        and (transposed or fits(x[1], pairs=has_pairs()) or _are_few(x[0], prod(weight) // x[1]))
        and all(size % BLOCK == 0 for size in weight)
        and all(dtype == jnp.bfloat16 for dtype in dtypes)
    )


def _are_few(rows: int, columns: int) -> bool:
    return rows <= grouped_product.most_rows() and columns % (grouped_product.VECTORS * native.lanes()) == 0


@dataclass(frozen=True)
class _ByRows:
    """`[T, K] @ [N, K]ᵀ`: an item is a block of the weight's rows."""

    rows: int  # of `x`
    out: str
    lanes: int  # numbers of float32 in a vector
    pairs: bool

    def num_items(self, code: Code) -> Value:
        return code.dim(1, 0) // BLOCK

    def item(self, code: Code, index: Value) -> None:
        start = index * BLOCK
        most = 6 if self.lanes == 16 else 2
        size = -(-self.rows // -(-self.rows // most))  # of tiles that are about equal
        for first in range(0, self.rows, size):
            with code.loop(start, start + BLOCK, 4) as n:
                self._tile(code, n, first, min(size, self.rows - first))

    def _tile(self, code: Code, n: Value, first: int, count: int) -> None:
        depth, columns = code.dim(0, 1), code.dim(1, 0)
        x, weight = code.arg(0, BF16), code.arg(1, BF16)
        xs = [x + depth * (first + row) for row in range(count)]
        ws = [weight + (n + place) * depth for place in range(4)]
        sums = [code.sums(4, self.lanes) for _ in xs]
        with code.loop(0, depth, PAIRS if self.pairs else self.lanes) as k:
            weights = [self._factors(w, k) for w in ws]
            for totals, numbers in zip(sums, xs, strict=True):
                row_part = self._factors(numbers, k)
                add_products(totals, row_part, weights)
        for row, totals in enumerate(sums):
            four = code.sums_of_four(results(totals))
            code.ret(0, TYPES[self.out]).put(columns * (first + row) + n, [four])

    def _factors(self, numbers: Buffer, place: Operand) -> Value:
        return numbers.vector(place, PAIRS) if self.pairs else numbers.vector(place, self.lanes).to(F32)


@dataclass(frozen=True)
class _ManyRowsByColumns(ManyRows):
    """`[T, K] @ [K, N]` of a weight in bfloat16."""

    def columns(self, code: Code) -> Value:
        return code.dim(1, 1)

    def start(self, code: Code, block: Value) -> tuple[Buffer, Operand]:
        return code.arg(1, I8) + block * (4 * self.lanes), self.columns(code) * 2

    def widen(self, code: Code, block: Value, buffer: Buffer) -> None:
        weight, line = self.start(code, block)
        with code.loop(0, code.dim(0, 1), 2) as k:
            rows = [(weight + (k + row) * line).of(BF16) for row in range(2)]
            vectors = [[row.vector(half * self.lanes, self.lanes) for half in range(2)] for row in rows]
            self.put(code, buffer, k, vectors)
