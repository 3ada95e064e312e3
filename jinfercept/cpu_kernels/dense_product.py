"""Products with a weight in bfloat16 as it lies: every number of the weight is read once from memory.

An item is a block of the weight's outputs. Sums are in float32. CPUs with bfloat16 dot products multiply pairs of numbers;
others widen numbers to float32 first. A block is widened in registers for few rows, and into a buffer for many (`ManyRows`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, Code, Variable
from jinfercept.cpu_kernels.tiles import PAIRS, ManyRows, add_products, fits, has_pairs, store, tile_rows, zeros

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
class Rows:
    """Code that kernels of products have in common.

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

    def _zeros(self, code: Code, count: int) -> list[Variable]:
        return zeros(code, count, self.lanes)

    def _load(self, code: Code, base: Any, offset: Any) -> Any:
        """A vector of pairs, or one of widened numbers."""
        return code.load(base, offset, PAIRS, of=BF16) if self.pairs else code.wide(base, offset, self.lanes, BF16)


@dataclass(frozen=True)
class _ByColumns(Rows):
    """`[T, K] @ [K, N]` of few rows: an item is a block of columns."""

    @property
    def name(self) -> str:
        return f"product_by_columns_{self.rows}_{self.out}_{self.lanes}_{self.pairs}"

    def num_items(self, code: Code) -> Any:
        return code.builder.sdiv(code.dim(1, 1), I64(BLOCK))

    def item(self, code: Code, index: Any) -> None:
        b, depth, columns = code.builder, code.dim(0, 1), code.dim(1, 1)
        x, weight, column = code.arg(0), code.arg(1), b.mul(index, I64(BLOCK))
        sums = [self._zeros(code, BLOCK // self.lanes) for _ in range(self.rows)]
        xs = [code.at(x, b.mul(I64(row), depth), BF16) for row in range(self.rows)]
        step = 2 if self.pairs else 1
        with code.loop(I64(0), depth, step) as k:
            place = b.add(b.mul(k, columns), column)
            for row in range(step):
                far = code.at(weight, b.add(place, b.mul(columns, I64(AHEAD + row))), BF16)
                code.prefetch(far)
            weights = self._weights(code, weight, place, columns)
            for totals, numbers in zip(sums, xs, strict=True):
                if self.pairs:
                    number = code.splat(code.load(numbers, k, I32, of=BF16), self.lanes)
                else:
                    number = code.splat(b.fpext(code.load(numbers, k, BF16), F32), self.lanes)
                for total, part in zip(totals, weights, strict=True):
                    add_products(code, total, number, part)
        for row, totals in enumerate(sums):
            vectors = [total.get() for total in totals]
            if self.pairs:
                vectors = code.in_order(vectors)
            for part, vector in enumerate(vectors):
                start = b.add(b.mul(I64(row), columns), I64(part * self.lanes))
                store(code, vector, b.add(start, column), self.out)

    def _weights(self, code: Code, weight: Any, place: Any, columns: Any) -> list[Any]:
        """The block's numbers of one row of the weight; of two rows as pairs, in another order."""
        if not self.pairs:
            starts = range(0, BLOCK, self.lanes)
            return [self._load(code, weight, code.builder.add(place, I64(start))) for start in starts]
        upper, lower = (self._load(code, weight, row) for row in (place, code.builder.add(place, columns)))
        return code.in_pairs(upper, lower)


@dataclass(frozen=True)
class _ByRows(Rows):
    """`[T, K] @ [N, K]ᵀ`: an item is a block of the weight's rows."""

    @property
    def name(self) -> str:
        return f"product_by_rows_{self.rows}_{self.out}_{self.lanes}_{self.pairs}"

    def num_items(self, code: Code) -> Any:
        return code.builder.sdiv(code.dim(1, 0), I64(BLOCK))

    def item(self, code: Code, index: Any) -> None:
        start = code.builder.mul(index, I64(BLOCK))
        for first, count in self._tiles(6 if self.lanes == 16 else 2):
            with code.loop(start, code.builder.add(start, I64(BLOCK)), 4) as n:
                self._tile(code, n, first, count)

    def _tile(self, code: Code, n: Any, first: int, count: int) -> None:
        b, depth, columns = code.builder, code.dim(0, 1), code.dim(1, 0)
        x, weight = code.arg(0), code.arg(1)
        xs = [code.at(x, b.mul(I64(first + row), depth), BF16) for row in range(count)]
        ws = [code.at(weight, b.mul(b.add(n, I64(place)), depth), BF16) for place in range(4)]
        sums = [self._zeros(code, 4) for _ in xs]
        with code.loop(I64(0), depth, PAIRS.count if self.pairs else self.lanes) as k:
            weights = [self._load(code, w, k) for w in ws]
            for totals, numbers in zip(sums, xs, strict=True):
                row_part = self._load(code, numbers, k)
                for total, w in zip(totals, weights, strict=True):
                    add_products(code, total, row_part, w)
        for row, totals in enumerate(sums):
            start = b.add(b.mul(I64(first + row), columns), n)
            store(code, code.sums_of_four([total.get() for total in totals]), start, self.out)

    def _tiles(self, most: int) -> list[tuple[int, int]]:
        """First row and number of rows of tiles that are about equal."""
        size = -(-self.rows // -(-self.rows // most))
        return [(first, min(size, self.rows - first)) for first in range(0, self.rows, size)]


@dataclass(frozen=True)
class _ManyRowsByColumns(ManyRows):
    """`[T, K] @ [K, N]` of a weight in bfloat16."""

    @property
    def name(self) -> str:
        return f"product_of_tiles_{self.tile}_{self.out}_{self.lanes}_{self.pairs}"

    def columns(self, code: Code) -> Any:
        return code.dim(1, 1)

    def start(self, code: Code, block: Any) -> tuple[Any, Any]:
        b = code.builder
        return code.at(code.arg(1), b.mul(block, I64(4 * self.lanes))), b.mul(self.columns(code), I64(2))

    def widen(self, code: Code, block: Any, buffer: Any) -> None:
        b, vector = code.builder, ir.VectorType(BF16, self.lanes)
        weight, line = self.start(code, block)
        with code.loop(I64(0), code.dim(0, 1), 2) as k:
            rows = [code.at(weight, b.mul(b.add(k, I64(row)), line)) for row in range(2)]
            self.put(code, buffer, k, [[code.load(row, half, vector) for half in range(2)] for row in rows])
