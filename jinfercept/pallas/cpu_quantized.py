"""Products of a few rows with weights of 4 or 8 bits, as `quantized_product.py` stores them: numbers are widened in registers.

An item is a block of columns. Sums of a group are in float32 and have its scale afterwards; its offset has the sum of the
group's part of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped
from llvmlite import ir

from jinfercept.pallas import cpu_kernels
from jinfercept.pallas.cpu_code import BF16, F32, I8, I32, I64, Code
from jinfercept.pallas.cpu_product import PAIRS, Rows
from jinfercept.pallas.quantized_product import ORDER, WIDTH

STEP = 8
"""Inputs of a word of 4-bit numbers, and of a step of the loop."""
AHEAD_BYTES = 2048
"""Of the weight, fetched before they are needed: the next block is mostly the same thread's."""
_SCALES = {"float16": ir.HalfType(), "float32": F32}
_FACTORS = {"float32": F32, "bfloat16": BF16}


def product(
    zero: int,
    out: DTypeLike,
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Float[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
) -> Float[Array, "T N"]:
    """`x @ unpack(Packed(values, scales, offsets, zero))`, of what `quantized_product.supports`; many rows in several calls."""
    if len(x) > (most := cpu_kernels.MOST_ROWS):
        parts = (x[start : start + most] for start in range(0, len(x), most))
        return jnp.concatenate([product(zero, out, part, values, scales, offsets) for part in parts])
    kernel = _Quantized(
        rows=len(x),
        out=jnp.dtype(out).name,
        lanes=cpu_kernels.lanes(),
        pairs=x.dtype == jnp.bfloat16 and "avx512bf16" in cpu_kernels.features(),
        bits=4 if values.dtype == jnp.uint32 else 8,
        factors=x.dtype.name,
        scales=scales.dtype.name,
        has_offsets=offsets is not None,
        zero=zero,
    )
    operands = (x, values, scales, offsets) if offsets is not None else (x, values, scales)
    return cpu_kernels.call(kernel, jax.ShapeDtypeStruct((len(x), len(values) * WIDTH), out), *operands)


@dataclass(frozen=True)
class _Quantized(Rows):
    """Operands: rows, values, scales, and offsets if there are any."""

    bits: int
    factors: str
    scales: str
    has_offsets: bool
    zero: int

    @property
    def name(self) -> str:
        """See `Kernel`."""
        return "quantized_" + "_".join(str(field) for field in vars(self).values()).replace("-", "m")

    def num_items(self, code: Code) -> Any:
        return code.dim(1, 0)

    def item(self, code: Code, index: Any) -> None:
        b, depth, groups = code.builder, code.dim(0, 1), code.dim(2, 1)
        group = b.sdiv(depth, groups)
        values = code.at(code.arg(1), b.mul(index, b.mul(depth, I64(WIDTH * self.bits // 8))))
        for first, count in self._tiles(self.most):
            xs = [code.at(code.arg(0), b.mul(I64(first + row), depth), _FACTORS[self.factors]) for row in range(count)]
            totals = [self._zeros(code, WIDTH // self.lanes) for _ in xs]
            with code.loop(I64(0), groups) as number:
                start = b.mul(number, group)
                end = b.add(start, group)
                sums = self._sums(code, values, xs, start, end)
                place = b.mul(b.add(b.mul(index, groups), number), I64(WIDTH))
                self._scale(code, totals, sums, 2, place)
                if self.has_offsets:
                    self._scale(code, totals, self._row_sums(code, xs, start, end), 3, place)
            for row, vectors in enumerate(totals):
                columns = b.mul(code.dim(1, 0), I64(WIDTH))
                place = b.add(b.mul(I64(first + row), columns), b.mul(index, I64(WIDTH)))
                for part, vector in enumerate(vectors):
                    self._store(code, vector.get(), b.add(place, I64(part * self.lanes)))

    @property
    def most(self) -> int:
        return 12 if self.pairs else 6 if self.lanes == 16 else 2

    def _sums(self, code: Code, values: Any, xs: list[Any], start: Any, end: Any) -> list[list[Any]]:
        """For every row and vector of columns, the sum over a group."""
        b, parts = code.builder, WIDTH // self.lanes
        chains = max(1, min(4, 8 // (parts * len(xs))))
        sums = [[self._zeros(code, parts) for _ in xs] for _ in range(chains)]
        with code.loop(start, end, STEP) as k:
            line = WIDTH * self.bits // 8
            for ahead in range(0, STEP * line, 64):
                code.prefetch(code.at(values, b.add(b.mul(k, I64(line)), I64(AHEAD_BYTES + ahead))))
            for turn, (place, weights) in enumerate(self._weights(code, values, k)):
                for totals, numbers in zip(sums[turn % chains], xs, strict=True):
                    x = self._factor(code, numbers, b.add(k, I64(place)))
                    for total, weight in zip(totals, weights, strict=True):
                        self._add(code, total, x, weight)
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
        b, wide = code.builder, ir.VectorType(F32, self.lanes)
        vector = ir.VectorType(I32, self.lanes)
        starts = range(0, WIDTH, self.lanes)
        if self.bits == 4:
            place = b.mul(b.sdiv(k, I64(STEP)), I64(WIDTH))
            words = [code.load(values, b.add(place, I64(start)), vector, of=I32) for start in starts]
            if self.pairs:
                table = PAIRS([float((n & 15) - self.zero) for n in range(32)])
                for i in range(4):
                    yield (
                        2 * i,
                        [
                            self._looked_up(code, table, b.lshr(word, vector([4 * i] * self.lanes)) if i else word)
                            for word in words
                        ],
                    )
            else:
                for i, row in enumerate(ORDER):
                    numbers = [
                        b.and_(b.lshr(word, vector([4 * i] * self.lanes)), vector([15] * self.lanes)) for word in words
                    ]
                    yield row, [b.sitofp(self._from_zero(code, q), wide) for q in numbers]
        else:

            def load(row: int, start: int) -> Any:
                place = b.add(b.mul(b.add(k, I64(row)), I64(WIDTH)), I64(start))
                q = b.sext(code.load(values, place, ir.VectorType(I8, self.lanes), of=I8), vector)
                return b.sitofp(self._from_zero(code, q), wide)

            if self.pairs:
                for row in range(0, STEP, 2):
                    yield row, [self._pair(code, load(row, start), load(row + 1, start)) for start in starts]
            else:
                for row in range(STEP):
                    yield row, [load(row, start) for start in starts]

    def _from_zero(self, code: Code, q: Any) -> Any:
        return code.builder.sub(q, q.type([self.zero] * self.lanes)) if self.zero else q

    def _pair(self, code: Code, low: Any, high: Any) -> Any:
        b, vector = code.builder, ir.VectorType(I32, self.lanes)
        low, high = b.bitcast(low, vector), b.bitcast(high, vector)
        return b.bitcast(b.or_(b.lshr(low, vector([16] * self.lanes)), high), PAIRS)

    def _looked_up(self, code: Code, table: Any, index: Any) -> Any:
        words = ir.VectorType(ir.IntType(16), 32)
        b = code.builder
        found = code.call("llvm.x86.avx512.permvar.hi.512", words, b.bitcast(table, words), b.bitcast(index, words))
        return b.bitcast(found, PAIRS)

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
                result.append([whole] * (WIDTH // self.lanes))
        return result

    def _scale(self, code: Code, totals: Any, sums: list[list[Any]], operand: int, place: Any) -> None:
        """Add sums times the scales, or times the offsets, of a group."""
        b = code.builder
        wide = ir.VectorType(F32, self.lanes)
        kind = _SCALES[self.scales]
        scales = [
            code.load(code.arg(operand), b.add(place, I64(start)), ir.VectorType(kind, self.lanes), of=kind)
            for start in range(0, WIDTH, self.lanes)
        ]
        scales = scales if kind == F32 else [b.fpext(scale, wide) for scale in scales]
        for row, vectors in zip(totals, sums, strict=True):
            for total, vector, scale in zip(row, vectors, scales, strict=True):
                total.set(code.fma(vector, scale, total.get()))
