"""Products with weights of 4 or 8 bits, as `packed_weights.py` stores them.

An item is a block of columns. For few rows, numbers are widened in registers: sums of a group are in float32 and are scaled
afterwards, and the group's offset is multiplied by the sum of the part of a row. For many rows a block is dequantised into a
buffer (`ManyRows`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import (
    BF16,
    F32,
    I8,
    I16,
    I32,
    TYPES,
    Buffer,
    Code,
    Operand,
    Value,
    Variable,
    add_products,
    results,
)
from jinfercept.cpu_kernels.tiles import ManyRows, fits, has_pairs, tile_rows
from jinfercept.pallas.layouts.packed_weights import DOUBLED_E2M1, E2M1, ORDER, WIDTH

STEP = 8
"""Inputs of a word of 4-bit numbers, and of a step of the loop."""
AHEAD_BYTES = 2048
"""Of the weight, fetched before they are needed: the next block is mostly the same thread's."""


def product(
    zero: int,
    out: DTypeLike,
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Shaped[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
) -> Float[Array, "T N"]:
    """`x @ unpack(Packed(values, scales, offsets, zero))`, if `supports` and `quantized.supports` accept it.

    Where a CPU multiplies more bfloat16 rows than `most_few` as pairs, the weight's numbers are rounded to bfloat16.
    """
    lanes, kind = native.lanes(), jnp.dtype(out).name
    pairs = x.dtype == jnp.bfloat16 and has_pairs()
    stored = PackedNumbers(4 if values.dtype == jnp.uint32 else 8, scales.dtype.name, offsets is not None, zero, lanes)
    if len(x) <= most_few(x.dtype):
        kernel = _Quantized(len(x), kind, lanes, pairs, x.dtype.name, stored)
    else:
        kernel = _QuantizedManyRows(tile_rows(len(x)), kind, lanes, pairs, stored)
        x = x if pairs else x.astype(jnp.float32)
    operands = (x, values, scales, offsets) if offsets is not None else (x, values, scales)
    return native.call(kernel, jax.ShapeDtypeStruct((len(x), len(values) * WIDTH), out), *operands)


def supports(x: Float[Array, "T K"] | jax.ShapeDtypeStruct) -> bool:
    """Whether a kernel multiplies so many rows of so many numbers."""
    return len(x) <= most_few(x.dtype) or fits(x.shape[1], pairs=x.dtype == jnp.bfloat16 and has_pairs())


def most_few(dtype: DTypeLike) -> int:
    """Rows whose sums of a block are all in registers."""
    return 2 if native.lanes() == 8 else 12 if dtype == jnp.bfloat16 and has_pairs() else 6


@dataclass(frozen=True)
class PackedNumbers:
    """How a weight is stored; widens its numbers to float32.

    Attributes:
        bits: of a number.
        scales: name of the type of scales and offsets.
        zero: subtracted from the numbers.
    """

    bits: int
    scales: str
    has_offsets: bool
    zero: int
    lanes: int

    def rows(self, code: Code, values: Buffer, k: Value, count: int) -> list[list[Value]]:
        """`count` vectors of each of the `STEP` rows of a block from row `k` on. `values` are the block's bytes."""
        if self.bits == 4:
            words = self.words(values, k, count)
            numbers = [[word >> 4 * ORDER.index(row) & 15 for word in words] for row in range(STEP)]
        else:
            parts = range(0, count * self.lanes, self.lanes)
            places = [(k + row) * WIDTH for row in range(STEP)]
            numbers = [[values.vector(place + part, self.lanes).to(I32) for part in parts] for place in places]
        if self.is_e2m1:
            numbers = [[self._doubled(code, q) for q in row] for row in numbers]
        return [[(q - self.zero if self.zero else q).to(F32) for q in row] for row in numbers]

    @property
    def is_e2m1(self) -> bool:
        """Whether the numbers are those of MXFP4: all that are read here are doubled."""
        return self.scales == "uint8"

    def _doubled(self, code: Code, bits: Value) -> Value:
        table = code.full(self.lanes, int(DOUBLED_E2M1), I32)
        size = table >> ((bits & 7) << 2) & 15
        return code.where(bits > 7, -size, size)

    def pairs(self, code: Code, values: Buffer, k: Value, count: int) -> Iterator[list[Value]]:
        """As `rows`, for 4-bit numbers: `count` vectors of bfloat16 pairs of each two rows, by look-up."""
        if self.is_e2m1:
            numbers = [2 * number for number in (*E2M1, *(-number for number in E2M1))]
        else:
            numbers = [float(n - self.zero) for n in range(16)]
        table = code.vector(2 * numbers, BF16).bits(I16)
        packed = self.words(values, k, count)
        for i in range(4):
            places = [(word >> 4 * i if i else word).bits(I16) for word in packed]
            yield [code.call("llvm.x86.avx512.permvar.hi.512", table.type, table, place).bits(BF16) for place in places]

    def words(self, values: Buffer, k: Operand, count: int) -> list[Value]:
        """`count` vectors of words of 4-bit numbers, of row `k` and those after it."""
        place = k // STEP * WIDTH
        return [values.of(I32).vector(place + part * self.lanes, self.lanes) for part in range(count)]

    def factors(self, code: Code, operand: int, place: Value, count: int) -> list[Value]:
        """`count` vectors of scales or offsets, from a place on."""
        places = [place + part * self.lanes for part in range(count)]
        if self.is_e2m1:
            return [self._powers(code, code.arg(operand, I8).vector(place, self.lanes)) for place in places]
        return [code.arg(operand, TYPES[self.scales]).vector(place, self.lanes).to(F32) for place in places]

    def _powers(self, code: Code, stored: Value) -> Value:
        # as `packed_weights.wide_scales`
        exponents = stored.unsigned(I32) - 1
        return (code.where(exponents < 0, 0, exponents) << 23).bits(F32)


@dataclass(frozen=True)
class _QuantizedManyRows(ManyRows):
    """Operands: rows, values, scales, and offsets if there are any."""

    stored: PackedNumbers

    def columns(self, code: Code) -> Value:
        return code.dim(1, 0) * WIDTH

    def start(self, code: Code, block: Value) -> tuple[Buffer, Operand]:
        bits = self.stored.bits
        stored, first = self._first(block)
        line = WIDTH * bits // 8
        place = stored * (code.dim(0, 1) * line) + first * (4 if bits == 4 else 1)
        return code.arg(1, I8) + place, line

    def widen(self, code: Code, block: Value, buffer: Buffer) -> None:
        depth, groups = code.dim(0, 1), code.dim(2, 1)
        group, (values, _), (stored, first) = depth // groups, self.start(code, block), self._first(block)
        with code.loop(0, groups) as number:
            place = (stored * groups + number) * WIDTH + first
            scales = self.stored.factors(code, 2, place, 2)
            offsets = self.stored.factors(code, 3, place, 2) if self.stored.has_offsets else None
            start = number * group
            with code.loop(start, start + group, STEP) as k:
                rows = [self._scaled(code, row, scales, offsets) for row in self.stored.rows(code, values, k, 2)]
                self.put(code, buffer, k, rows)

    def _scaled(self, code: Code, row: list[Value], scales: list[Value], offsets: list[Value] | None) -> list[Value]:
        if offsets is None:
            return [number * scale for number, scale in zip(row, scales, strict=True)]
        return [offset.with_products(number, scale) for number, scale, offset in zip(row, scales, offsets, strict=True)]

    def _first(self, block: Value) -> tuple[Value, Value]:
        # the stored block, and the first column there
        share = WIDTH // (2 * self.lanes)
        return block // share, block % share * (2 * self.lanes)


@dataclass(frozen=True)
class _Quantized:
    """Operands: few rows, values, scales, and offsets if there are any."""

    rows: int
    out: str
    lanes: int
    pairs: bool
    dtype: str  # of the rows
    stored: PackedNumbers

    def num_items(self, code: Code) -> Value:
        return code.dim(1, 0)

    def item(self, code: Code, index: Value) -> None:
        depth, groups = code.dim(0, 1), code.dim(2, 1)
        group = depth // groups
        values = code.arg(1, I8) + index * (depth * (WIDTH * self.stored.bits // 8))
        xs = [code.arg(0, TYPES[self.dtype]) + depth * row for row in range(self.rows)]
        totals = [code.sums(self._parts, self.lanes) for _ in xs]
        with code.loop(0, groups) as number:
            start = number * group
            end = start + group
            sums = self._sums(code, values, xs, start, end)
            place = (index * groups + number) * WIDTH
            self._scale(code, totals, sums, 2, place)
            if self.stored.has_offsets:
                self._scale(code, totals, self._row_sums(code, xs, start, end), 3, place)
        for row, vectors in enumerate(totals):
            place = code.dim(1, 0) * WIDTH * row + index * WIDTH
            code.ret(0, TYPES[self.out]).put(place, results(vectors))

    @property
    def _parts(self) -> int:
        return WIDTH // self.lanes

    def _sums(self, code: Code, values: Buffer, xs: list[Buffer], start: Value, end: Value) -> list[list[Value]]:
        chains = max(1, min(4, 8 // (self._parts * len(xs))))
        sums = [[code.sums(self._parts, self.lanes) for _ in xs] for _ in range(chains)]
        with code.loop(start, end, STEP) as k:
            line = WIDTH * self.stored.bits // 8
            for ahead in range(0, STEP * line, 64):
                (values + (k * line + (AHEAD_BYTES + ahead))).prefetch()
            for turn, (place, weights) in enumerate(self._weights(code, values, k)):
                for totals, numbers in zip(sums[turn % chains], xs, strict=True):
                    x = (numbers + (k + place)).of(I32)[0] if self.pairs else numbers[k + place].to(F32)
                    add_products(totals, x.broadcast(self.lanes), weights)
        result = [results(totals) for totals in sums[0]]
        for chain in sums[1:]:
            result = [
                [x + y.value for x, y in zip(ours, theirs, strict=True)]
                for ours, theirs in zip(result, chain, strict=True)
            ]
        return result

    def _weights(self, code: Code, values: Buffer, k: Value) -> Iterator[tuple[int, list[Value]]]:
        stored = self.stored
        if self.pairs and stored.bits == 4:
            for i, pairs in enumerate(stored.pairs(code, values, k, self._parts)):
                yield 2 * i, pairs
            return
        rows = stored.rows(code, values, k, self._parts)
        if self.pairs:  # a small whole number in float32 has the bits of bfloat16 in its upper half
            for row in range(0, STEP, 2):
                pairs = zip(rows[row], rows[row + 1], strict=True)
                yield row, [(low.bits(I32) >> 16 | high.bits(I32)).bits(BF16) for low, high in pairs]
        else:
            yield from enumerate(rows)

    def _row_sums(self, code: Code, xs: list[Buffer], start: Value, end: Value) -> list[list[Value]]:
        result = list[list[Value]]()
        for first in range(0, len(xs), 4):
            rows = xs[first : first + 4]
            sums = code.sums(len(rows), self.lanes)
            with code.loop(start, end, self.lanes) as k:
                for total, numbers in zip(sums, rows, strict=True):
                    total.value = total.value + numbers.vector(k, self.lanes).to(F32)
            four = code.sums_of_four([sums[min(row, len(rows) - 1)].value for row in range(4)])
            for row in range(len(rows)):
                result.append([four[row].broadcast(self.lanes)] * self._parts)  # once for each vector of columns
        return result

    def _scale(
        self, code: Code, totals: list[list[Variable]], sums: list[list[Value]], operand: int, place: Value
    ) -> None:
        scales = self.stored.factors(code, operand, place, self._parts)
        for row, vectors in zip(totals, sums, strict=True):
            for total, vector, scale in zip(row, vectors, scales, strict=True):
                total.value = total.value.with_products(vector, scale)
