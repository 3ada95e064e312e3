"""Products of many rows: kernels that widen a block of the weight's columns once, and multiply tiles of rows with it.

Sums are in float32. CPUs with bfloat16 dot products multiply pairs of numbers, others float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I8, I32, TYPES, Buffer, Code, Operand, Value, add_products, results

PAIRS = 32
"""Numbers of a vector of 16 pairs of bfloat16."""
PART_ROWS = 256
"""Most rows that are multiplied with one block after the other: they stay in a cache."""
BUFFER_BYTES = 1 << 20
"""Most of a widened block, which lies on the stack."""


def has_pairs() -> bool:
    """Whether this CPU multiplies pairs of bfloat16."""
    return "avx512bf16" in native.features() and 2 * native.lanes() == PAIRS


def tile_rows(num_rows: int) -> int:
    """Rows of a tile, so that all are about full: a tile's sums are two vectors for each row, all in registers."""
    most = 12 if native.lanes() == 16 else 6
    return -(-num_rows // -(-num_rows // most))


def fits(depth: int, *, pairs: bool) -> bool:
    """Whether the widened block of rows of `depth` numbers fits the buffer of `ManyRows`."""
    return depth * 2 * native.lanes() * (2 if pairs else 4) <= BUFFER_BYTES


@dataclass(frozen=True)
class ManyRows(ABC):
    """Many rows: an item widens a block of columns once, and multiplies tiles of rows with it.

    `x` is bfloat16 where the CPU multiplies pairs of these, else float32; so is the widened block.

    Attributes:
        tile: rows of a tile; `x` has as many at least.
        lanes: numbers of float32 in a vector; a block has two vectors of columns.
        pairs: whether the CPU multiplies pairs of bfloat16.
    """

    tile: int
    out: str
    lanes: int
    pairs: bool

    @abstractmethod
    def columns(self, code: Code) -> Value:
        """Columns of the weight, i64."""

    @abstractmethod
    def start(self, code: Code, block: Value) -> tuple[Buffer, Operand]:
        """A block's numbers from the first one on, as bytes, and bytes from a row of the block to the next."""

    @abstractmethod
    def widen(self, code: Code, block: Value, buffer: Buffer) -> None:
        """Give the buffer all rows of a block, with `put`."""

    def put(self, code: Code, buffer: Buffer, first: Value, rows: list[list[Value]]) -> None:
        """Write an even number of neighbouring rows, from row `first` on, into the buffer of the widened block. Each row is two
        vectors of bfloat16 or float32."""
        rows = [[vector.to(BF16 if self.pairs else F32) for vector in row] for row in rows]
        if self.pairs:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [[code.interleaved(*halves) for halves in zip(*two, strict=True)] for two in pairs]
        place = first * (2 * self.lanes // self._step)
        for index, vector in enumerate(vector for row in rows for vector in row):
            buffer[place + index * self.lanes] = vector

    def num_items(self, code: Code) -> Value:
        return row_parts(code) * self._blocks(code)

    def item(self, code: Code, index: Value) -> None:
        depth, blocks = code.dim(0, 1), self._blocks(code)
        steps = depth // self._step
        buffer = code.buffer(I32, steps * (2 * self.lanes), align=64)
        part, block = index // blocks, index % blocks
        self.widen(code, block, buffer)
        next_block, line = self.start(code, block + 1)
        with row_tiles(code, part, self.tile) as (tile, first):
            row = tile * steps  # of the next block, from which on this tile fetches rows
            is_left = row < depth
            ahead = Buffer(code, code.where(is_left, (next_block + row * line).address, buffer.address), I8)
            self._tile(code, buffer, first, block * (2 * self.lanes), ahead, code.where(is_left, code.number(line), 0))

    def _tile(self, code: Code, buffer: Buffer, start: Value, column: Value, ahead: Buffer, line: Value) -> None:
        depth, lanes, number = code.dim(0, 1), self.lanes, BF16 if self.pairs else F32
        x = code.arg(0, number)
        xs = [(x + (start + row) * depth).of(I32 if self.pairs else F32) for row in range(self.tile)]
        sums = [code.sums(2, lanes) for _ in xs]
        with code.loop(0, depth // self._step) as step:
            (ahead + step * line).prefetch()
            place = step * (2 * lanes)
            weights = [buffer.vector(place + half * lanes, lanes).bits(number) for half in range(2)]
            for totals, numbers in zip(sums, xs, strict=True):
                x = numbers[step].broadcast(lanes)
                add_products(totals, x, weights)
        result = code.ret(0, TYPES[self.out])
        for row, totals in enumerate(sums):
            result.put((start + row) * self.columns(code) + column, results(totals))

    @property
    def _step(self) -> int:
        return 2 if self.pairs else 1

    def _blocks(self, code: Code) -> Value:
        return self.columns(code) // (2 * self.lanes)


def row_parts(code: Code) -> Value:
    """The number of parts of the rows; a part stays in a cache while the blocks change."""
    return code.dim(0, 0).tiles(PART_ROWS)


@contextmanager
def row_tiles(code: Code, part: Value, size: int) -> Iterator[tuple[Value, Value]]:
    """Run the body for every tile of a part of the rows, with its number and its first row. The last tile begins early."""
    num_rows = code.dim(0, 0)
    first, end = (num_rows.tiles(size) * number // row_parts(code) for number in (part, part + 1))
    with code.loop(first, end) as tile:
        yield tile - first, code.least(tile * size, num_rows - size)
