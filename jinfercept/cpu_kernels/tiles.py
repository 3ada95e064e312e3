"""Products of many rows: kernels that widen a block of the weight's columns once, and multiply tiles of rows with it.

Sums are in float32. CPUs with bfloat16 dot products multiply pairs of numbers, others float32.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, Code, Variable

PAIRS = ir.VectorType(BF16, 32)  # 16 pairs
PART_ROWS = 256
"""Most rows that are multiplied with one block after the other: they stay in a cache."""
BUFFER_BYTES = 1 << 20
"""Most of a widened block, which lies on the stack."""


def has_pairs() -> bool:
    """Whether this CPU multiplies pairs of bfloat16."""
    return "avx512bf16" in native.features() and PAIRS.count == 2 * native.lanes()


def tile_rows(num_rows: int) -> int:
    """Rows of a tile, so that all are about full: a tile's sums are two vectors for each row, all in registers."""
    most = 12 if native.lanes() == 16 else 6
    return -(-num_rows // -(-num_rows // most))


def fits(depth: int, *, pairs: bool) -> bool:
    """Whether `ManyRows` can multiply rows of so many numbers."""
    return depth * 2 * native.lanes() * (2 if pairs else 4) <= BUFFER_BYTES


@dataclass(frozen=True)
class ManyRows(ABC):
    """Many rows: an item widens a block of columns once, and multiplies tiles of rows with it.

    `x` is bfloat16 where the CPU multiplies pairs of these, else float32; so is the widened block.

    Attributes:
        tile: rows of a tile; `x` has as many at least.
        out: name of the result's type.
        lanes: numbers of float32 in a vector; a block has two vectors of columns.
        pairs: whether the CPU multiplies pairs of bfloat16.
    """

    tile: int
    out: str
    lanes: int
    pairs: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """See `Kernel`."""

    @abstractmethod
    def columns(self, code: Code) -> Any:
        """Columns of the weight, i64."""

    @abstractmethod
    def start(self, code: Code, block: Any) -> tuple[Any, Any]:
        """Address of the first number of a block, and bytes from a row of the block to the next."""

    @abstractmethod
    def widen(self, code: Code, block: Any, buffer: Any) -> None:
        """Give the buffer all rows of a block, with `put`."""

    def put(self, code: Code, buffer: Any, first: Any, rows: list[list[Any]]) -> None:
        """Write neighbouring rows into the buffer, an even number of them.

        Args:
            buffer: address of the widened block.
            first: number of the first row, i64.
            rows: two vectors of each, of bfloat16 or float32.
        """
        number = BF16 if self.pairs else F32
        rows = [[_converted(code, vector, number) for vector in row] for row in rows]
        if self.pairs:
            order = [place for column in range(self.lanes) for place in (column, column + self.lanes)]
            rows = [
                [code.shuffle(upper, lower, order) for upper, lower in zip(*two, strict=True)]
                for two in zip(rows[::2], rows[1::2], strict=True)
            ]
        self.put_pairs(code, buffer, first, rows)

    def put_pairs(self, code: Code, buffer: Any, first: Any, rows: list[list[Any]]) -> None:
        """As `put`, what the buffer has: vectors of float32 rows, or of the pairs of two rows of bfloat16."""
        b = code.builder
        place = b.mul(first, I64(2 * self.lanes // self._step))
        for index, vector in enumerate(vector for row in rows for vector in row):
            code.store(vector, buffer, b.add(place, I64(index * self.lanes)), of=I32)

    def num_items(self, code: Code) -> Any:
        return code.builder.mul(row_parts(code), self._blocks(code))

    def item(self, code: Code, index: Any) -> None:
        b, depth, blocks = code.builder, code.dim(0, 1), self._blocks(code)
        steps = b.sdiv(depth, I64(self._step))
        buffer = b.alloca(I32, b.mul(steps, I64(2 * self.lanes)))
        buffer.align = 64
        part, block = b.sdiv(index, blocks), b.srem(index, blocks)
        self.widen(code, block, buffer)
        next_block, line = self.start(code, b.add(block, I64(1)))
        first, end = (self._first_tile(code, number) for number in (part, b.add(part, I64(1))))
        with code.loop(first, end) as tile:
            row = b.mul(b.sub(tile, first), steps)  # of the next block, from which on this tile fetches rows
            is_left = b.icmp_signed("<", row, depth)
            ahead = b.select(is_left, code.at(next_block, b.mul(row, line)), code.at(buffer, 0))
            self._tile(code, buffer, tile, b.mul(block, I64(2 * self.lanes)), ahead, b.select(is_left, line, I64(0)))

    def _tile(self, code: Code, buffer: Any, tile: Any, column: Any, ahead: Any, line: Any) -> None:
        """Multiply the rows of a tile; in every step, fetch the next line from `ahead` on. The last tile begins early."""
        b, depth, num_rows = code.builder, code.dim(0, 1), code.dim(0, 0)
        number, kind = (BF16, PAIRS) if self.pairs else (F32, ir.VectorType(F32, self.lanes))
        start, last = b.mul(tile, I64(self.tile)), b.sub(num_rows, I64(self.tile))
        start = b.select(b.icmp_signed("<", start, last), start, last)
        xs = [code.at(code.arg(0), b.mul(b.add(start, I64(row)), depth), number) for row in range(self.tile)]
        sums = [zeros(code, 2, self.lanes) for _ in xs]
        with code.loop(I64(0), b.sdiv(depth, I64(self._step))) as step:
            code.prefetch(code.at(ahead, b.mul(step, line)))
            place = b.mul(step, I64(2 * self.lanes))
            weights = [code.load(buffer, b.add(place, I64(half * self.lanes)), kind, of=I32) for half in range(2)]
            for totals, numbers in zip(sums, xs, strict=True):
                x = code.splat(code.load(numbers, step, I32 if self.pairs else F32), self.lanes)
                for total, weight in zip(totals, weights, strict=True):
                    add_products(code, total, x, weight)
        for row, totals in enumerate(sums):
            place = b.add(b.mul(b.add(start, I64(row)), self.columns(code)), column)
            for half, total in enumerate(totals):
                store(code, total.get(), b.add(place, I64(half * self.lanes)), self.out)

    @property
    def _step(self) -> int:
        """Rows of the weight that are multiplied at once."""
        return 2 if self.pairs else 1

    def _blocks(self, code: Code) -> Any:
        return code.builder.sdiv(self.columns(code), I64(2 * self.lanes))

    def _first_tile(self, code: Code, part: Any) -> Any:
        b = code.builder
        num_tiles = b.sdiv(b.add(code.dim(0, 0), I64(self.tile - 1)), I64(self.tile))
        return b.sdiv(b.mul(num_tiles, part), row_parts(code))


def _converted(code: Code, vector: Any, number: ir.Type) -> Any:
    kind = ir.VectorType(number, vector.type.count)
    if vector.type == kind:
        return vector
    return code.narrow(vector) if number == BF16 else code.builder.fpext(vector, kind)


def row_parts(code: Code) -> Any:
    """The number of parts of the rows; a part stays in a cache while the blocks change."""
    return code.builder.sdiv(code.builder.add(code.dim(0, 0), I64(PART_ROWS - 1)), I64(PART_ROWS))


def zeros(code: Code, count: int, lanes: int) -> list[Variable]:
    """Vectors for sums."""
    return [code.variable(ir.VectorType(F32, lanes)([0.0] * lanes)) for _ in range(count)]


def add_products(code: Code, total: Variable, x: Any, y: Any) -> None:
    """Add the products of two vectors' numbers, or of their pairs if `y` has these."""
    if y.type == PAIRS:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        total.set(code.call(name, total.get().type, total.get(), y, code.builder.bitcast(x, PAIRS)))
    else:
        total.set(code.fma(x, y, total.get()))


def store(code: Code, values: Any, offset: Any, out: str) -> None:
    """Write a vector of sums to the result, whose type has the name `out`."""
    number = BF16 if out == "bfloat16" else F32
    if number == BF16:
        values = code.narrow(values)
    code.store(values, code.ret(0), offset, of=number)
