"""Products of rows with the weights of experts, each row with one weight of a stack, which is read where it lies.

An item is a block of columns of one expert that has rows. Sums are in float32, and a row's are added up in one order whatever
other rows there are: its product has the same bits. CPUs with bfloat16 dot products multiply pairs of bfloat16, those with
matrix tiles (AMX) tiles of pairs where experts have several rows; others widen numbers to float32 first.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I8, I16, I32, I64, Code
from jinfercept.cpu_kernels.tiles import BUFFER_BYTES, PAIRS, add_products, has_pairs, store, zeros

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
) -> Float[Array, "N M"]:
    """`y[places[i]] = x[sources[i]] @ stack[expert of i]`, of what `supports`.

    Args:
        sizes: the first so many of the numbers `i` are of the first expert, and so on.
        sources: a row of `x` for each `i`.
        places: a permutation.
    """
    pairs = x.dtype == jnp.bfloat16 and has_pairs()
    (_, depth, columns), has_many = stack.shape, len(places) // len(stack) >= FEWEST_TILED
    fits = depth % PAIRS.count == 0 and depth * 2 * (_TILE_BYTES + _TILE_ROWS) <= BUFFER_BYTES
    tiled = pairs and has_many and fits and native.has_matrix_tiles()
    kernel = _GroupedProduct(x.dtype.name, native.lanes(), pairs, tiled)
    result = jax.ShapeDtypeStruct((len(places), columns), x.dtype)
    return native.call(kernel, result, x, stack, *(numbers.astype(jnp.int32) for numbers in (sizes, sources, places)))


def supports(stack: tuple[int, ...], *dtypes: DTypeLike) -> bool:
    """Whether `product` computes this, of the shape of the stack and the types of rows and stack."""
    return (
        stack[1] % UNROLLED == 0
        and stack[2] % (VECTORS * native.lanes()) == 0
        and len({jnp.dtype(dtype) for dtype in dtypes}) == 1
        and dtypes[0] in (jnp.float32, jnp.bfloat16)
    )


@dataclass(frozen=True)
class _GroupedProduct:
    """Operands: see `product`. In registers, tiles of rows are multiplied whose sums are all there.

    In matrix tiles, rows are multiplied with a copy of the block that has pairs. Tiles 0 to 3 have the sums of 16 columns each,
    tile 4 has numbers of the rows, and tiles 5 to 7 of the block.

    Attributes:
        dtype: name of the type of rows, weights and result.
        lanes: numbers of float32 in a vector.
        pairs: whether the CPU multiplies pairs of bfloat16.
        tiled: whether it does in matrix tiles.
    """

    dtype: str
    lanes: int
    pairs: bool
    tiled: bool

    @property
    def name(self) -> str:
        return f"grouped_product_{self.dtype}_{self.lanes}_{self.pairs}_{self.tiled}"

    def num_items(self, code: Code) -> Any:
        b, used = code.builder, code.variable(I64(0))
        with code.loop(I64(0), code.dim(1, 0)) as expert:
            used.set(b.add(used.get(), self._is_used(code, expert)))
        return b.mul(used.get(), self._blocks(code))

    def item(self, code: Code, index: Any) -> None:
        b, blocks = code.builder, self._blocks(code)
        countdown, expert, start = code.variable(b.sdiv(index, blocks)), code.variable(I64(0)), code.variable(I64(0))
        with code.loop_while(lambda: b.icmp_signed(">=", countdown.get(), self._is_used(code, expert.get()))):
            countdown.set(b.sub(countdown.get(), self._is_used(code, expert.get())))
            start.set(b.add(start.get(), self._size(code, expert.get())))
            expert.set(b.add(expert.get(), I64(1)))
        column = b.mul(b.srem(index, blocks), I64(VECTORS * self.lanes))
        first = b.mul(b.mul(expert.get(), code.dim(1, 1)), code.dim(1, 2))
        weight = code.at(code.arg(1), b.add(first, column), self._number)
        multiply = self._in_tiles if self.tiled else self._in_registers
        multiply(code, start.get(), self._size(code, expert.get()), weight, column)

    def _row(self, code: Code, number: Any) -> Any:
        """Address of a row's numbers."""
        source = self._whole(code, 3, number)
        return code.at(code.arg(0), code.builder.mul(source, code.dim(1, 1)), self._number)

    def _start(self, code: Code, number: Any, column: Any) -> Any:
        """Where in the result a row's products with a block begin."""
        place = self._whole(code, 4, number)
        return code.builder.add(code.builder.mul(place, code.dim(1, 2)), column)

    def _whole(self, code: Code, operand: int, index: Any) -> Any:
        return code.builder.sext(code.load(code.arg(operand), index, I32), I64)

    def _weights(self, code: Code, weight: Any, k: Any, vectors: int) -> list[Any]:
        """So many vectors of a row's numbers; of two rows as pairs, in another order."""
        b, columns = code.builder, code.dim(1, 2)
        place = b.mul(k, columns)
        if not self.pairs:
            places = [b.add(place, I64(vector * self.lanes)) for vector in range(vectors)]
            return [code.wide(weight, start, self.lanes, self._number) for start in places]
        result = list[Any]()
        for start in range(0, vectors * self.lanes, PAIRS.count):
            rows = [b.add(row, I64(start)) for row in (place, b.add(place, columns))]
            upper, lower = (code.load(weight, row, PAIRS, of=BF16) for row in rows)
            result += code.in_pairs(upper, lower)
        return result

    def _fetch(self, code: Code, weight: Any, k: Any, vectors: int) -> None:
        """Ask for the rows of a step that come later, or for those of the next columns."""
        b, depth, columns = code.builder, code.dim(1, 1), code.dim(1, 2)
        num_bytes = 4 if self._number == F32 else 2
        later = b.add(k, I64(AHEAD))
        is_left = b.icmp_signed("<", later, depth)
        row = b.select(is_left, later, b.sub(later, depth))
        beside = b.select(is_left, I64(0), I64(vectors * self.lanes))
        for more in range(UNROLLED):
            line = code.at(weight, b.add(b.mul(b.add(row, I64(more)), columns), beside), self._number)
            for place in range(0, vectors * self.lanes * num_bytes, 64):
                code.prefetch(code.at(line, place))

    @property
    def _number(self) -> ir.Type:
        return F32 if self.dtype == "float32" else BF16

    def _blocks(self, code: Code) -> Any:
        return code.builder.sdiv(code.dim(1, 2), I64(VECTORS * self.lanes))

    def _size(self, code: Code, expert: Any) -> Any:
        return self._whole(code, 2, expert)

    def _is_used(self, code: Code, expert: Any) -> Any:
        """1 or 0."""
        b = code.builder
        return b.zext(b.icmp_signed(">", self._size(code, expert), I64(0)), I64)

    def _in_registers(self, code: Code, start: Any, size: Any, weight: Any, column: Any) -> None:
        b = code.builder
        num_tiles = b.sdiv(b.add(size, I64(self._most - 1)), I64(self._most))
        rows = b.sdiv(b.add(size, b.sub(num_tiles, I64(1))), num_tiles)
        for count in range(1, self._most + 1):
            with b.if_then(b.icmp_signed("==", rows, I64(count))), code.loop(I64(0), num_tiles) as tile:
                first = code.least(b.mul(tile, rows), b.sub(size, rows))  # the last one begins early
                self._tile(code, b.add(start, first), count, weight, column)

    @property
    def _most(self) -> int:
        """Rows of a tile, of which each has `VECTORS / 2` vectors of sums."""
        return 12 if self.lanes == 16 else 6

    def _tile(self, code: Code, first: Any, count: int, weight: Any, column: Any) -> None:
        """Multiply rows with a block, or many with one half of it after the other."""
        b, depth = code.builder, code.dim(1, 1)
        rows = [b.add(first, I64(row)) for row in range(count)]
        xs = [self._row(code, row) for row in rows]
        starts = [self._start(code, row, column) for row in rows]
        vectors = VECTORS if count <= self._most // 2 else VECTORS // 2
        with code.loop(I64(0), I64(VECTORS * self.lanes), vectors * self.lanes) as part:
            sums = [zeros(code, vectors, self.lanes) for _ in xs]
            with code.loop(I64(0), depth, UNROLLED) as k:
                self._fetch(code, code.at(weight, part, self._number), k, vectors)
                for more in range(0, UNROLLED, 2 if self.pairs else 1):
                    self._add(code, sums, xs, b.add(k, I64(more)), code.at(weight, part, self._number))
            for totals, start in zip(sums, starts, strict=True):
                vectors = [total.get() for total in totals]
                for place, vector in enumerate(code.in_order(vectors) if self.pairs else vectors):
                    store(code, vector, b.add(b.add(start, part), I64(place * self.lanes)), self.dtype)

    def _add(self, code: Code, sums: list[list[Any]], xs: list[Any], k: Any, weight: Any) -> None:
        """Add the products with a row of the weight, or with two, to the sums."""
        weights = self._weights(code, weight, k, len(sums[0]))
        for totals, numbers in zip(sums, xs, strict=True):
            x = code.load(numbers, k, I32 if self.pairs else self._number, of=self._number)
            x = code.builder.fpext(x, F32) if x.type == BF16 else x
            for total, part in zip(totals, weights, strict=True):
                add_products(code, total, code.splat(x, self.lanes), part)

    def _in_tiles(self, code: Code, start: Any, size: Any, weight: Any, column: Any) -> None:
        b, depth, line = code.builder, code.dim(1, 1), VECTORS * _TILE_BYTES
        sizes = (b.mul(depth, I64(line // 2)), b.mul(depth, I64(2 * _TILE_ROWS)), I64(_TILE_ROWS * line), I64(64))
        block, xs, sums, config = buffers = [b.alloca(I8, num_bytes) for num_bytes in sizes]
        for place in buffers:
            place.align = _TILE_BYTES
        with code.loop(I64(0), depth, UNROLLED) as k:
            self._fetch(code, weight, k, VECTORS)
            for row in (b.add(k, I64(more)) for more in range(0, UNROLLED, 2)):
                pairs = code.at(block, b.mul(row, I64(line // 2)))
                for vector, numbers in enumerate(self._weights(code, weight, row, VECTORS)):
                    code.store(numbers, pairs, vector * _TILE_BYTES, of=I8)
        with code.loop(I64(0), size, _TILE_ROWS) as tile:
            count, first = code.least(b.sub(size, tile), I64(_TILE_ROWS)), b.add(start, tile)
            with code.loop(I64(0), count) as row:
                source, copy = self._row(code, b.add(first, row)), code.at(xs, b.mul(row, depth), BF16)
                with code.loop(I64(0), depth, PAIRS.count) as k:
                    code.store(code.load(source, k, PAIRS, of=BF16), copy, k, of=BF16)
            self._configure(code, config, count)
            self._multiply_tiles(code, block, xs, sums)
            with code.loop(I64(0), count) as row:
                own, place = code.at(sums, b.mul(row, I64(line))), self._start(code, b.add(first, row), column)
                kind = ir.VectorType(F32, self.lanes)
                vectors = [code.load(own, vector * _TILE_BYTES, kind, of=I8) for vector in range(VECTORS)]
                for part, vector in enumerate(code.in_order(vectors)):
                    store(code, vector, b.add(place, I64(part * self.lanes)), self.dtype)
        code.call("llvm.x86.tilerelease", ir.VoidType())

    def _multiply_tiles(self, code: Code, block: Any, xs: Any, sums: Any) -> None:
        b, line, nothing = code.builder, I64(VECTORS * _TILE_BYTES), ir.VoidType()
        row_bytes = b.mul(code.dim(1, 1), I64(2))
        for tile in range(VECTORS):
            code.call("llvm.x86.tilezero", nothing, I8(tile))
        with code.loop(I64(0), row_bytes, _TILE_BYTES) as place:
            code.call("llvm.x86.tileloadd64", nothing, I8(4), code.at(xs, place), row_bytes)
            pairs = code.at(block, b.mul(place, I64(VECTORS * _TILE_ROWS)))
            for tile in range(VECTORS):
                weights = I8(5 + tile % 3)
                code.call("llvm.x86.tileloadd64", nothing, weights, code.at(pairs, tile * _TILE_BYTES), line)
                code.call("llvm.x86.tdpbf16ps", nothing, I8(tile), I8(4), weights)
        for tile in range(VECTORS):
            code.call("llvm.x86.tilestored64", nothing, I8(tile), code.at(sums, tile * _TILE_BYTES), line)

    def _configure(self, code: Code, config: Any, rows: Any) -> None:
        """Tell the CPU the sizes of the tiles: those of sums and of the rows have so many rows."""
        code.store(ir.VectorType(I8, 64)([1] + [0] * 63), config, 0, of=I8)
        for tile in range(8):
            code.store(I16(_TILE_BYTES), config, 8 + tile)
            code.store(code.builder.trunc(rows, I8) if tile < 5 else I8(_TILE_ROWS), config, 48 + tile)
        code.call("llvm.x86.ldtilecfg", ir.VoidType(), config)
