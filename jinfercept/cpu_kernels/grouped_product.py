"""Products of rows with the weights of experts, each row with one weight of a stack, which is read where it lies.

An item is a block of columns of one expert that has rows. Sums are in float32. A row's are added up in one order whatever other
rows there are, so its product has the same bits. CPUs with bfloat16 dot products multiply pairs of bfloat16. Those with matrix
tiles (AMX) multiply tiles of pairs where experts have several rows. Others widen numbers to float32 first.
"""

from dataclasses import dataclass

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
    I16,
    I32,
    I64,
    TYPES,
    VOID,
    Buffer,
    Code,
    Value,
    Variable,
    add_products,
    results,
)
from jinfercept.cpu_kernels.tiles import BUFFER_BYTES, PAIRS, has_pairs

VECTORS = 4
"""Of a block's columns."""
AHEAD = 32
"""Rows of a weight that are fetched before they are needed."""
UNROLLED = 4
"""Rows of a weight in a step of the loop over them."""
FEWEST_TILED = 4
"""Rows of an expert in the mean from which on matrix tiles are faster than vectors."""
_TILE_ROWS, _TILE_BYTES = 16, 64  # of a row


def product(
    x: Float[Array, "T K"],
    stack: Float[Array, "X K M"],
    sizes: Int[Array, "X"],
    sources: Int[Array, "N"],
    places: Int[Array, "N"],
    out: DTypeLike | None = None,
) -> Float[Array, "N M"]:
    """`y[places[i]] = x[sources[i]] @ stack[expert of i]`, for arguments that `supports` accepts.

    Args:
        sizes: of each expert, how many of the numbers `i` it has, one expert after the other.
        sources: a row of `x` for each `i`.
        places: a permutation.
        out: type of the result; None: that of the rows.
    """
    out = jnp.dtype(x.dtype if out is None else out)
    pairs = x.dtype == jnp.bfloat16 and has_pairs()
    (_, depth, columns), has_many = stack.shape, len(places) // len(stack) >= FEWEST_TILED
    fits = depth % PAIRS == 0 and depth * 2 * (_TILE_BYTES + _TILE_ROWS) <= BUFFER_BYTES
    tiled = pairs and has_many and fits and native.has_matrix_tiles()
    kernel = _GroupedProduct(x.dtype.name, out.name, native.lanes(), pairs, tiled)
    result = jax.ShapeDtypeStruct((len(places), columns), out)
    return native.call(kernel, result, x, stack, *(numbers.astype(jnp.int32) for numbers in (sizes, sources, places)))


def supports(stack: tuple[int, ...], *dtypes: DTypeLike) -> bool:
    """Whether `product` computes this, by the shape of the stack and the types of rows and stack."""
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
    """Operands: see `product`. In registers, tiles of rows are multiplied whose sums are all there.

    In matrix tiles, rows are multiplied with a copy of the block that has pairs. Tiles 0 to 3 have the sums of 16 columns each,
    tile 4 has numbers of the rows, and tiles 5 to 7 of the block.
    """

    dtype: str
    out: str
    lanes: int  # numbers of float32 in a vector
    pairs: bool  # whether the CPU multiplies pairs of bfloat16
    tiled: bool  # whether it does in matrix tiles

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
        multiply = self._in_tiles if self.tiled else self._in_registers
        multiply(code, start.value, self._size(code, expert.value), weight, column)

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

    def _in_registers(self, code: Code, start: Value, size: Value, weight: Buffer, column: Value) -> None:
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

    def _in_tiles(self, code: Code, start: Value, size: Value, weight: Buffer, column: Value) -> None:
        depth, line = code.dim(1, 1), VECTORS * _TILE_BYTES
        sizes = depth * (line // 2), depth * (2 * _TILE_ROWS), code.number(_TILE_ROWS * line), code.number(64)
        block, xs, sums, config = (code.buffer(I8, num_bytes, align=_TILE_BYTES) for num_bytes in sizes)
        with code.loop(0, depth, UNROLLED) as k:
            self._fetch(code, weight, k, VECTORS)
            for row in (k + more for more in range(0, UNROLLED, 2)):
                pairs = block + row * (line // 2)
                for vector, numbers in enumerate(self._weights(code, weight, row, VECTORS)):
                    (pairs + vector * _TILE_BYTES).of(BF16)[0] = numbers
        with code.loop(0, size, _TILE_ROWS) as tile:
            count, first = code.least(size - tile, _TILE_ROWS), start + tile
            with code.loop(0, count) as row:
                source, copy = self._row(code, first + row), xs.of(BF16) + row * depth
                with code.loop(0, depth, PAIRS) as k:
                    copy[k] = source.vector(k, PAIRS)
            self._configure(code, config, count)
            self._multiply_tiles(code, block, xs, sums)
            with code.loop(0, count) as row:
                own, place = sums + row * line, self._start(code, first + row, column)
                vectors = [(own + vector * _TILE_BYTES).of(F32).vector(0, self.lanes) for vector in range(VECTORS)]
                code.ret(0, TYPES[self.out]).put(place, code.in_order(vectors))
        code.call("llvm.x86.tilerelease", VOID)

    def _multiply_tiles(self, code: Code, block: Buffer, xs: Buffer, sums: Buffer) -> None:
        row_bytes = code.dim(1, 1) * 2

        def tile(instruction: str, *operands: Value | int) -> None:
            numbers = (code.number(operand, I8) for operand in operands)
            code.call(f"llvm.x86.{instruction}", VOID, *numbers)

        for number in range(VECTORS):
            tile("tilezero", number)
        line = code.number(VECTORS * _TILE_BYTES)
        with code.loop(0, row_bytes, _TILE_BYTES) as place:
            tile("tileloadd64", 4, (xs + place).address, row_bytes)
            pairs = block + place * (VECTORS * _TILE_ROWS)
            for number in range(VECTORS):
                tile("tileloadd64", 5 + number % 3, (pairs + number * _TILE_BYTES).address, line)
                tile("tdpbf16ps", number, 4, 5 + number % 3)
        for number in range(VECTORS):
            tile("tilestored64", number, (sums + number * _TILE_BYTES).address, line)

    def _configure(self, code: Code, config: Buffer, rows: Value) -> None:
        config[0] = code.vector([1] + [0] * 63, I8)
        for tile in range(8):
            config.of(I16)[8 + tile] = code.number(_TILE_BYTES, I16)
            # tiles of sums and of rows have `rows` rows
            config[48 + tile] = rows.to(I8) if tile < 5 else code.number(_TILE_ROWS, I8)
        code.call("llvm.x86.ldtilecfg", VOID, config.address)
