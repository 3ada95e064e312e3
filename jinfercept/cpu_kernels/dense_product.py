"""Products with a weight in bfloat16 as it lies: every number of the weight is read once from memory.

An item is a block of the weight's outputs. Sums are in float32. CPUs with bfloat16 dot products multiply pairs of numbers;
others widen numbers to float32 first. A block is widened in registers for few rows, and into a buffer for many (`ManyRows`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I8, I32, TYPES, Buffer, Code, Operand, Value, add_products, results
from jinfercept.cpu_kernels.tiles import PAIRS, ManyRows, fits, has_pairs, tile_rows

BLOCK = 32  # numbers in a cache line, and outputs of an item of few rows
AHEAD = 32  # rows of the weight that are fetched before they are needed
MOST_ROWS = 32
"""Of a product with a transposed weight, and of any on a CPU without bfloat16 dot products."""


def product(
    x: Float[Array, "T K"], weight: Float[Array, "..."], *, transposed: bool, out: DTypeLike
) -> Float[Array, "T N"]:
    """`x @ weight`, of what `supports`.

    Args:
        x, weight: bfloat16; the weight is `[K, N]`, or `[N, K]` if `transposed`.
        out: type of the result.
    """
    lanes, pairs, kind = native.lanes(), has_pairs(), jnp.dtype(out).name
    if transposed:
        kernel = _ByRows(len(x), kind, lanes, pairs)
    elif len(x) <= _most_few():
        kernel = _ByColumns(len(x), kind, lanes, pairs)
    else:
        kernel = _ManyRowsByColumns(tile_rows(len(x)), kind, lanes, pairs)
        x = x if pairs else x.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(x), weight.shape[0 if transposed else 1]), out)
    return native.call(kernel, result, x, weight)


def supports(x: tuple[int, ...], weight: tuple[int, ...], *dtypes: DTypeLike, transposed: bool) -> bool:
    """Whether `product` computes this, of the shapes and types of its factors."""
    return (
        (x[0] <= MOST_ROWS or (has_pairs() and not transposed))
        and (x[0] <= _most_few() or transposed or fits(x[1], pairs=has_pairs()))
        and all(size % BLOCK == 0 for size in weight)
        and all(dtype == jnp.bfloat16 for dtype in dtypes)
    )


def _most_few() -> int:
    """Rows whose sums of a block are all in registers."""
    return 12 if has_pairs() else 6 if native.lanes() == 16 else 3


@dataclass(frozen=True)
class FewRows:
    """Products of few rows.

    Attributes:
        rows: of `x`.
        out: name of the result's type.
        lanes: numbers of float32 in a vector.
        pairs: whether the CPU multiplies pairs of bfloat16.
    """

    rows: int
    out: str
    lanes: int
    pairs: bool

    def factors(self, numbers: Buffer, place: Operand) -> Value:
        """A vector of pairs of bfloat16, or one of widened numbers."""
        return numbers.vector(place, PAIRS) if self.pairs else numbers.vector(place, self.lanes).to(F32)

    def factor(self, numbers: Buffer, place: Operand) -> Value:
        """A vector of equal numbers in float32, or of equal pairs as words."""
        number = (numbers + place).of(I32)[0] if self.pairs else numbers[place].to(F32)
        return number.broadcast(self.lanes)


@dataclass(frozen=True)
class _ByColumns(FewRows):
    """`[T, K] @ [K, N]`: an item is a block of columns."""

    def num_items(self, code: Code) -> Value:
        return code.dim(1, 1) // BLOCK

    def item(self, code: Code, index: Value) -> None:
        depth, columns = code.dim(0, 1), code.dim(1, 1)
        x, weight, column = code.arg(0, BF16), code.arg(1, BF16), index * BLOCK
        sums = [code.sums(BLOCK // self.lanes, self.lanes) for _ in range(self.rows)]
        xs = [x + depth * row for row in range(self.rows)]
        step = 2 if self.pairs else 1
        with code.loop(0, depth, step) as k:
            place = k * columns + column
            for row in range(step):
                (weight + (place + columns * (AHEAD + row))).prefetch()
            weights = self._weights(code, weight, place, columns)
            for totals, numbers in zip(sums, xs, strict=True):
                number = self.factor(numbers, k)
                add_products(totals, number, weights)
        for row, totals in enumerate(sums):
            vectors = results(totals)
            code.ret(0, TYPES[self.out]).put(columns * row + column, code.in_order(vectors) if self.pairs else vectors)

    def _weights(self, code: Code, weight: Buffer, place: Value, columns: Value) -> list[Value]:
        """The block's numbers of one row of the weight; of two rows as pairs, in another order."""
        if not self.pairs:
            return [self.factors(weight, place + start) for start in range(0, BLOCK, self.lanes)]
        return code.in_pairs(self.factors(weight, place), self.factors(weight, place + columns))


@dataclass(frozen=True)
class _ByRows(FewRows):
    """`[T, K] @ [N, K]ᵀ`: an item is a block of the weight's rows."""

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
            weights = [self.factors(w, k) for w in ws]
            for totals, numbers in zip(sums, xs, strict=True):
                row_part = self.factors(numbers, k)
                add_products(totals, row_part, weights)
        for row, totals in enumerate(sums):
            four = code.sums_of_four(results(totals))
            code.ret(0, TYPES[self.out]).put(columns * (first + row) + n, [four])


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
