"""Products with weights of 4 or 8 bits, as `quantized_product.py` stores them.

An item is a block of columns. Numbers are widened in registers for few rows: sums of a group are in float32 and have its scale
afterwards; its offset has the sum of the part of a row. For many rows a block is dequantised into a buffer (`ManyRows`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I8, I32, I64, Code
from jinfercept.cpu_kernels.dense_product import Rows
from jinfercept.cpu_kernels.tiles import PAIRS, ManyRows, add_products, fits, has_pairs, store, tile_rows
from jinfercept.layouts.packed_weights import DOUBLED_E2M1, E2M1, ORDER, WIDTH

STEP = 8
"""Inputs of a word of 4-bit numbers, and of a step of the loop."""
AHEAD_BYTES = 2048
"""Of the weight, fetched before they are needed: the next block is mostly the same thread's."""
_FACTORS = {"float32": F32, "bfloat16": BF16}


def product(
    zero: int,
    out: DTypeLike,
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Shaped[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
) -> Float[Array, "T N"]:
    """`x @ unpack(Packed(values, scales, offsets, zero))`, of what `supports` and `quantized_product.supports`.

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
        has_offsets: whether there are any.
        zero: subtracted from the numbers.
        lanes: numbers of a vector.
    """

    bits: int
    scales: str
    has_offsets: bool
    zero: int
    lanes: int

    def __str__(self) -> str:
        return "_".join(str(field) for field in vars(self).values()).replace("-", "m")

    def rows(self, code: Code, values: Any, k: Any, count: int) -> list[list[Any]]:
        """So many vectors of each of the `STEP` rows of a block from row `k` on; `values`: the block's first number."""
        b, vector = code.builder, ir.VectorType(I32, self.lanes)
        if self.bits == 4:
            words = self.words(code, values, k, count)
            shifts = [4 * ORDER.index(row) for row in range(STEP)]
            numbers = [
                [b.and_(b.lshr(word, vector([shift] * self.lanes)), vector([15] * self.lanes)) for word in words]
                for shift in shifts
            ]
        else:
            byte = ir.VectorType(I8, self.lanes)
            places = [b.mul(b.add(k, I64(row)), I64(WIDTH)) for row in range(STEP)]
            numbers = [
                [
                    b.sext(code.load(values, b.add(place, I64(part * self.lanes)), byte, of=I8), vector)
                    for part in range(count)
                ]
                for place in places
            ]
        zero = vector([self.zero] * self.lanes)
        wide = ir.VectorType(F32, self.lanes)
        if self.is_e2m1:
            numbers = [[self._doubled(code, q) for q in row] for row in numbers]
        return [[b.sitofp(b.sub(q, zero) if self.zero else q, wide) for q in row] for row in numbers]

    @property
    def is_e2m1(self) -> bool:
        """Whether the numbers are those of MXFP4: all that are read here are doubled."""
        return self.scales == "uint8"

    def _doubled(self, code: Code, bits: Any) -> Any:
        """A vector of whole numbers, twice those of 4 bits that are e2m1."""
        b, vector = code.builder, ir.VectorType(I32, self.lanes)

        def every(number: int) -> Any:
            return vector([number] * self.lanes)

        size = b.shl(b.and_(bits, every(7)), every(2))
        size = b.and_(b.lshr(every(int(DOUBLED_E2M1)), size), every(15))
        return b.select(b.icmp_unsigned(">", bits, every(7)), b.neg(size), size)

    def pairs(self, code: Code, values: Any, k: Any, count: int) -> Iterator[list[Any]]:
        """As `rows`, of 4-bit numbers and looked up: so many vectors of bfloat16 pairs of each two rows."""
        b, vector, words = code.builder, ir.VectorType(I32, self.lanes), ir.VectorType(ir.IntType(16), 2 * self.lanes)
        if self.is_e2m1:
            numbers = [2 * number for number in (*E2M1, *(-number for number in E2M1))]
        else:
            numbers = [float(n - self.zero) for n in range(16)]
        table = b.bitcast(PAIRS(2 * numbers), words)
        packed = self.words(code, values, k, count)
        for i in range(4):
            places = [b.lshr(word, vector([4 * i] * self.lanes)) if i else word for word in packed]
            looked_up = (
                code.call("llvm.x86.avx512.permvar.hi.512", words, table, b.bitcast(place, words)) for place in places
            )
            yield [b.bitcast(pair, PAIRS) for pair in looked_up]

    def words(self, code: Code, values: Any, k: Any, count: int) -> list[Any]:
        """So many vectors of words of 4-bit numbers, of row `k` and those after it."""
        b, vector = code.builder, ir.VectorType(I32, self.lanes)
        place = b.mul(b.sdiv(k, I64(STEP)), I64(WIDTH))
        return [code.load(values, b.add(place, I64(part * self.lanes)), vector, of=I32) for part in range(count)]

    def factors(self, code: Code, operand: int, place: Any, count: int) -> list[Any]:
        """So many vectors of scales or offsets, from a place on."""
        kind = ir.HalfType() if self.scales == "float16" else F32
        places = [code.builder.add(place, I64(part * self.lanes)) for part in range(count)]
        if self.is_e2m1:
            return [self._power(code, operand, place) for place in places]
        return [code.wide(code.arg(operand), place, self.lanes, kind) for place in places]

    def _power(self, code: Code, operand: int, place: Any) -> Any:
        """A vector of the scales of `packed_weights.wide_scales`."""
        b, vector = code.builder, ir.VectorType(I32, self.lanes)
        stored = code.load(code.arg(operand), place, ir.VectorType(I8, self.lanes), of=I8)
        exponents = b.sub(b.zext(stored, vector), vector([1] * self.lanes))
        exponents = b.select(
            b.icmp_signed("<", exponents, vector([0] * self.lanes)), vector([0] * self.lanes), exponents
        )
        return b.bitcast(b.shl(exponents, vector([23] * self.lanes)), ir.VectorType(F32, self.lanes))


@dataclass(frozen=True)
class _QuantizedManyRows(ManyRows):
    """Operands: rows, values, scales, and offsets if there are any."""

    stored: PackedNumbers

    @property
    def name(self) -> str:
        return f"quantized_tiles_{self.tile}_{self.out}_{self.pairs}_{self.stored}"

    def columns(self, code: Code) -> Any:
        return code.builder.mul(code.dim(1, 0), I64(WIDTH))

    def start(self, code: Code, block: Any) -> tuple[Any, Any]:
        b, bits = code.builder, self.stored.bits
        stored, first = self._first(code, block)
        line = WIDTH * bits // 8
        place = b.add(b.mul(stored, b.mul(code.dim(0, 1), I64(line))), b.mul(first, I64(4 if bits == 4 else 1)))
        return code.at(code.arg(1), place), I64(line)

    def widen(self, code: Code, block: Any, buffer: Any) -> None:
        b, depth, groups = code.builder, code.dim(0, 1), code.dim(2, 1)
        group, (values, _), (stored, first) = b.sdiv(depth, groups), self.start(code, block), self._first(code, block)
        with code.loop(I64(0), groups) as number:
            place = b.add(b.mul(b.add(b.mul(stored, groups), number), I64(WIDTH)), first)
            scales = self.stored.factors(code, 2, place, 2)
            offsets = self.stored.factors(code, 3, place, 2) if self.stored.has_offsets else None
            start = b.mul(number, group)
            with code.loop(start, b.add(start, group), STEP) as k:
                if self.pairs and self.stored.bits == 4:
                    self.put_pairs(code, buffer, k, self._wide_pairs(code, values, k, scales, offsets))
                else:
                    rows = [self._scaled(code, row, scales, offsets) for row in self.stored.rows(code, values, k, 2)]
                    self.put(code, buffer, k, rows)

    def _wide_pairs(self, code: Code, values: Any, k: Any, scales: Any, offsets: Any) -> list[list[Any]]:
        """Two vectors of pairs of each two rows, from row `k` on."""
        b, bits, wide = code.builder, ir.VectorType(I32, self.lanes), ir.VectorType(F32, self.lanes)
        order = [place for column in range(self.lanes) for place in (column, column + self.lanes)]

        def rounded(lower: Any, upper: Any) -> Any:
            near = code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, upper, lower)
            return code.shuffle(near, near, order)

        result = list[list[Any]]()
        for pairs in self.stored.pairs(code, values, k, 2):
            words = [b.bitcast(pair, bits) for pair in pairs]
            lower = [b.bitcast(b.shl(word, bits([16] * self.lanes)), wide) for word in words]
            upper = [b.bitcast(b.and_(word, bits([-1 << 16] * self.lanes)), wide) for word in words]
            rows = [self._scaled(code, row, scales, offsets) for row in (lower, upper)]
            result.append([rounded(*two) for two in zip(*rows, strict=True)])
        return result

    def _scaled(self, code: Code, row: list[Any], scales: list[Any], offsets: list[Any] | None) -> list[Any]:
        if offsets is None:
            return [code.builder.fmul(number, scale) for number, scale in zip(row, scales, strict=True)]
        return [code.fma(*three) for three in zip(row, scales, offsets, strict=True)]

    def _first(self, code: Code, block: Any) -> tuple[Any, Any]:
        """The stored block in which a block lies, and its first column there."""
        share = WIDTH // (2 * self.lanes)
        b = code.builder
        return b.sdiv(block, I64(share)), b.mul(b.srem(block, I64(share)), I64(2 * self.lanes))


@dataclass(frozen=True)
class _Quantized(Rows):
    """Few rows. Operands: rows, values, scales, and offsets if there are any."""

    factors: str
    stored: PackedNumbers

    @property
    def name(self) -> str:
        return f"quantized_{self.rows}_{self.out}_{self.pairs}_{self.factors}_{self.stored}"

    def num_items(self, code: Code) -> Any:
        return code.dim(1, 0)

    def item(self, code: Code, index: Any) -> None:
        b, depth, groups = code.builder, code.dim(0, 1), code.dim(2, 1)
        group = b.sdiv(depth, groups)
        values = code.at(code.arg(1), b.mul(index, b.mul(depth, I64(WIDTH * self.stored.bits // 8))))
        xs = [code.at(code.arg(0), b.mul(I64(row), depth), _FACTORS[self.factors]) for row in range(self.rows)]
        totals = [self._zeros(code, self._parts) for _ in xs]
        with code.loop(I64(0), groups) as number:
            start = b.mul(number, group)
            end = b.add(start, group)
            sums = self._sums(code, values, xs, start, end)
            place = b.mul(b.add(b.mul(index, groups), number), I64(WIDTH))
            self._scale(code, totals, sums, 2, place)
            if self.stored.has_offsets:
                self._scale(code, totals, self._row_sums(code, xs, start, end), 3, place)
        for row, vectors in enumerate(totals):
            columns = b.mul(code.dim(1, 0), I64(WIDTH))
            place = b.add(b.mul(I64(row), columns), b.mul(index, I64(WIDTH)))
            for part, vector in enumerate(vectors):
                store(code, vector.get(), b.add(place, I64(part * self.lanes)), self.out)

    @property
    def _parts(self) -> int:
        """Vectors of a block's columns."""
        return WIDTH // self.lanes

    def _sums(self, code: Code, values: Any, xs: list[Any], start: Any, end: Any) -> list[list[Any]]:
        """For every row and vector of columns, the sum over a group."""
        b, parts = code.builder, self._parts
        chains = max(1, min(4, 8 // (parts * len(xs))))
        sums = [[self._zeros(code, parts) for _ in xs] for _ in range(chains)]
        with code.loop(start, end, STEP) as k:
            line = WIDTH * self.stored.bits // 8
            for ahead in range(0, STEP * line, 64):
                code.prefetch(code.at(values, b.add(b.mul(k, I64(line)), I64(AHEAD_BYTES + ahead))))
            for turn, (place, weights) in enumerate(self._weights(code, values, k)):
                for totals, numbers in zip(sums[turn % chains], xs, strict=True):
                    x = self._factor(code, numbers, b.add(k, I64(place)))
                    for total, weight in zip(totals, weights, strict=True):
                        add_products(code, total, x, weight)
        result = [[total.get() for total in totals] for totals in sums[0]]
        for chain in sums[1:]:
            result = [
                [b.fadd(x, y.get()) for x, y in zip(ours, theirs, strict=True)]
                for ours, theirs in zip(result, chain, strict=True)
            ]
        return result

    def _factor(self, code: Code, numbers: Any, place: Any) -> Any:
        """One number of a row, or two, for all columns."""
        if self.pairs:
            return code.splat(code.load(numbers, place, I32, of=BF16), self.lanes)
        number = code.load(numbers, place, _FACTORS[self.factors])
        return code.splat(number if self.factors == "float32" else code.builder.fpext(number, F32), self.lanes)

    def _weights(self, code: Code, values: Any, k: Any) -> Iterator[tuple[int, list[Any]]]:
        """Inputs of a step, with their numbers of all columns."""
        stored = self.stored
        if self.pairs and stored.bits == 4:
            for i, pairs in enumerate(stored.pairs(code, values, k, self._parts)):
                yield 2 * i, pairs
            return
        rows = stored.rows(code, values, k, self._parts)
        if self.pairs:
            for row in range(0, STEP, 2):
                pairs = zip(rows[row], rows[row + 1], strict=True)
                yield row, [self._pair(code, low, high) for low, high in pairs]
        else:
            yield from enumerate(rows)

    def _pair(self, code: Code, low: Any, high: Any) -> Any:
        b, vector = code.builder, ir.VectorType(I32, self.lanes)
        low, high = b.bitcast(low, vector), b.bitcast(high, vector)
        return b.bitcast(b.or_(b.lshr(low, vector([16] * self.lanes)), high), PAIRS)

    def _row_sums(self, code: Code, xs: list[Any], start: Any, end: Any) -> list[list[Any]]:
        """For every row, its sum over a group, once for each vector of columns."""
        b, result = code.builder, list[list[Any]]()
        for first in range(0, len(xs), 4):
            rows = xs[first : first + 4]
            sums = self._zeros(code, len(rows))
            with code.loop(start, end, self.lanes) as k:
                for total, numbers in zip(sums, rows, strict=True):
                    total.set(b.fadd(total.get(), code.wide(numbers, k, self.lanes, _FACTORS[self.factors])))
            four = code.sums_of_four([sums[min(row, len(rows) - 1)].get() for row in range(4)])
            for row in range(len(rows)):
                whole = code.splat(b.extract_element(four, I32(row)), self.lanes)
                result.append([whole] * self._parts)
        return result

    def _scale(self, code: Code, totals: Any, sums: list[list[Any]], operand: int, place: Any) -> None:
        """Add sums times the scales, or times the offsets, of a group."""
        scales = self.stored.factors(code, operand, place, self._parts)
        for row, vectors in zip(totals, sums, strict=True):
            for total, vector, scale in zip(row, vectors, scales, strict=True):
                total.set(code.fma(vector, scale, total.get()))
