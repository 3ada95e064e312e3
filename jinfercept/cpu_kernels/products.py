"""Products with weights of float32 or bfloat16 as they lie: every number of a weight is read once from memory.

Two products: rows with one weight, in bfloat16 (`dense_product`); and rows with the weights of experts, each row with one
weight of a stack (`grouped_product`). An item is a block of a weight's columns, and for experts of one expert that has rows.
Sums are in float32. A row's are added up in one order whatever other rows there are, so its product has the same bits. CPUs
with bfloat16 dot products multiply pairs of bfloat16, others widen numbers to float32 first. For few rows numbers are widened
in registers, where one weight is a stack of one expert; for many, a block is widened into a buffer (`ManyRows`).
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import (
    BF16,
    F32,
    I8,
    I32,
    I64,
    TYPES,
    Buffer,
    Code,
    Operand,
    Value,
    Variable,
    add_products,
    results,
)
from jinfercept.cpu_kernels.tiles import PAIRS, ManyRows, fits, has_pairs, tile_rows

VECTORS = 4
"""Of a block's columns."""
AHEAD = 32
"""Rows of a weight that are fetched before they are needed."""
UNROLLED = 4
"""Rows of a weight in a step of the loop over them."""


def grouped_product(
    x: Float[Array, "T K"],
    stack: Float[Array, "X K M"],
    sizes: Int[Array, "X"],
    sources: Int[Array, "N"],
    places: Int[Array, "N"],
    out: DTypeLike | None = None,
) -> Float[Array, "N M"]:
    """`y[places[i]] = x[sources[i]] @ stack[expert of i]`, for arguments that `supports_grouped` accepts.

    Args:
        sizes: of each expert, how many of the numbers `i` it has, one expert after the other.
        sources: a row of `x` for each `i`.
        places: a permutation.
        out: type of the result; None: that of the rows.
    """
    out = jnp.dtype(x.dtype if out is None else out)
    pairs = x.dtype == jnp.bfloat16 and has_pairs()
    kernel = _GroupedProduct(x.dtype.name, out.name, native.lanes(), pairs)
    result = jax.ShapeDtypeStruct((len(places), stack.shape[2]), out)
    return native.call(kernel, result, x, stack, *(numbers.astype(jnp.int32) for numbers in (sizes, sources, places)))


def supports_grouped(stack: tuple[int, ...], *dtypes: DTypeLike) -> bool:
    """Whether `grouped_product` computes this, by the shape of the stack and the types of rows and stack."""
    return (
        stack[1] % UNROLLED == 0
        and stack[2] % (VECTORS * native.lanes()) == 0
        and len({jnp.dtype(dtype) for dtype in dtypes}) == 1
        and dtypes[0] in (jnp.float32, jnp.bfloat16)
    )


def most_rows() -> int:
    """Rows of a tile, of which each has `VECTORS / 2` vectors of sums."""
    return 12 if native.lanes() == 16 else 6


@dataclass(frozen=True)
class _GroupedProduct:
    """Operands: see `grouped_product`. Tiles of rows are multiplied whose sums are all in registers."""

    dtype: str
    out: str
    lanes: int  # numbers of float32 in a vector
    pairs: bool  # whether the CPU multiplies pairs of bfloat16

    def num_items(self, code: Code) -> Value:
        used = code.variable(0)
        with code.loop(0, code.dim(1, 0)) as expert:
            used.value = used.value + self._is_used(code, expert)
        return used.value * self._blocks(code)

    def item(self, code: Code, index: Value) -> None:
        blocks = self._blocks(code)
        countdown, expert, start = code.variable(index // blocks), code.variable(0), code.variable(0)
        with code.loop_while(lambda: countdown.value >= self._is_used(code, expert.value)):
            countdown.value = countdown.value - self._is_used(code, expert.value)
            start.value = start.value + self._size(code, expert.value)
            expert.value = expert.value + 1
        column = index % blocks * (VECTORS * self.lanes)
        weight = code.arg(1, self._number) + (expert.value * code.dim(1, 1) * code.dim(1, 2) + column)
        self._multiply(code, start.value, self._size(code, expert.value), weight, column)

    @property
    def _number(self) -> ir.Type:
        return TYPES[self.dtype]

    def _blocks(self, code: Code) -> Value:
        return code.dim(1, 2) // (VECTORS * self.lanes)

    def _size(self, code: Code, expert: Value) -> Value:
        return self._whole(code, 2, expert)

    def _is_used(self, code: Code, expert: Value) -> Value:
        return (self._size(code, expert) > 0).unsigned(I64)

    def _row(self, code: Code, number: Value) -> Buffer:
        return code.arg(0, self._number) + self._whole(code, 3, number) * code.dim(1, 1)

    def _start(self, code: Code, number: Value, column: Value) -> Value:
        return self._whole(code, 4, number) * code.dim(1, 2) + column

    def _whole(self, code: Code, operand: int, index: Value) -> Value:
        return code.arg(operand, I32)[index].to(I64)

    def _weights(self, code: Code, weight: Buffer, k: Value, vectors: int) -> list[Value]:
        columns = code.dim(1, 2)
        place = k * columns
        if not self.pairs:
            return [weight.vector(place + vector * self.lanes, self.lanes).to(F32) for vector in range(vectors)]
        # of two rows as pairs, in the order that `in_order` undoes
        result = list[Value]()
        for start in range(0, vectors * self.lanes, PAIRS):
            upper, lower = (weight.vector(row + start, PAIRS) for row in (place, place + columns))
            result += code.in_pairs(upper, lower)
        return result

    def _fetch(self, code: Code, weight: Buffer, k: Value, vectors: int) -> None:
        depth, columns = code.dim(1, 1), code.dim(1, 2)
        per_line = 16 if self._number == F32 else 32
        later = k + AHEAD
        is_left = later < depth
        row = code.where(is_left, later, later - depth)
        beside = code.where(is_left, code.number(0), vectors * self.lanes)
        for more in range(UNROLLED):
            line = weight + ((row + more) * columns + beside)
            for place in range(0, vectors * self.lanes, per_line):
                (line + place).prefetch()

    def _multiply(self, code: Code, start: Value, size: Value, weight: Buffer, column: Value) -> None:
        num_tiles = size.tiles(most_rows())
        rows = size.tiles(num_tiles)
        for count in range(1, most_rows() + 1):
            with code.when(rows.equals(count)), code.loop(0, num_tiles) as tile:
                first = code.least(tile * rows, size - rows)  # the last one begins early
                self._tile(code, start + first, count, weight, column)

    def _tile(self, code: Code, first: Value, count: int, weight: Buffer, column: Value) -> None:
        depth, rows = code.dim(1, 1), [first + row for row in range(count)]
        xs = [self._row(code, row) for row in rows]
        starts = [self._start(code, row, column) for row in rows]
        # many rows are multiplied with one half of the block after the other
        vectors = VECTORS if count <= most_rows() // 2 else VECTORS // 2
        with code.loop(0, VECTORS * self.lanes, vectors * self.lanes) as part:
            sums = [code.sums(vectors, self.lanes) for _ in xs]
            with code.loop(0, depth, UNROLLED) as k:
                self._fetch(code, weight + part, k, vectors)
                for more in range(0, UNROLLED, 2 if self.pairs else 1):
                    self._add(code, sums, xs, k + more, weight + part)
            for start, totals in zip(starts, sums, strict=True):
                products = results(totals)
                code.ret(0, TYPES[self.out]).put(start + part, code.in_order(products) if self.pairs else products)

    def _add(self, code: Code, sums: list[list[Variable]], xs: list[Buffer], k: Value, weight: Buffer) -> None:
        weights = self._weights(code, weight, k, len(sums[0]))
        for totals, numbers in zip(sums, xs, strict=True):
            x = (numbers + k).of(I32)[0] if self.pairs else numbers[k].to(F32)
            add_products(totals, x.broadcast(self.lanes), weights)


BLOCK = 32  # numbers in a cache line, and outputs of an item of few rows
MOST_ROWS = 32
"""Of a product with a transposed weight, and of any on a CPU without bfloat16 dot products."""


def dense_product(
    x: Float[Array, "T K"], weight: Float[Array, "..."], *, transposed: bool, out: DTypeLike
) -> Float[Array, "T N"]:
    """`x @ weight` in bfloat16, for arguments that `supports_dense` accepts.

    The weight is `[K, N]`, or `[N, K]` if `transposed`.
    """
    lanes, pairs, kind = native.lanes(), has_pairs(), jnp.dtype(out).name
    if transposed:
        kernel = _ByRows(len(x), kind, lanes, pairs)
    elif _are_few(len(x), weight.shape[1]):
        rows = jnp.arange(len(x))
        return grouped_product(x, weight[None], jnp.full(1, len(x)), rows, rows, out)
    else:
        kernel = _ManyRowsByColumns(tile_rows(len(x)), kind, lanes, pairs)
        x = x if pairs else x.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(x), weight.shape[0 if transposed else 1]), out)
    return native.call(kernel, result, x, weight)


def supports_dense(x: tuple[int, ...], weight: tuple[int, ...], *dtypes: DTypeLike, transposed: bool) -> bool:
    """Whether `dense_product` computes this, by the shapes and types of its factors."""
    return (
        (x[0] <= MOST_ROWS or (has_pairs() and not transposed))
        and (transposed or fits(x[1], pairs=has_pairs()) or _are_few(x[0], prod(weight) // x[1]))
        and all(size % BLOCK == 0 for size in weight)
        and all(dtype == jnp.bfloat16 for dtype in dtypes)
    )


def _are_few(rows: int, columns: int) -> bool:
    return rows <= most_rows() and columns % (VECTORS * native.lanes()) == 0


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
