"""Products of rows that are rounded to int8 with weights of 4 or 8 bits, by instructions that multiply bytes.

Products of a group, the neighbours in a row that have one scale, are summed as whole numbers; groups in float32, and always in
the same order: the product of a row has the same bits whatever other rows are beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import F32, I8, I32, I64, Code
from jinfercept.cpu_kernels.packed_product import AHEAD_BYTES, STEP, PackedNumbers
from jinfercept.cpu_kernels.rounding import FACTOR_BYTES, Rounding
from jinfercept.cpu_kernels.tiles import row_parts, store, zeros
from jinfercept.layouts.packed_weights import WIDTH, Packed, row_group
from jinfercept.layouts.rows import Gated, Normed, Rows, dense

_SIGN = 128
"""Added to 8-bit weights, which the instruction takes without a sign."""


def usable() -> bool:
    """Whether this CPU multiplies bytes and adds them up in vectors as wide as its widest."""
    needed = "avx512vnni" if native.lanes() == 16 else "avxvnni"
    return native.usable() and needed in native.features()


def product(rows: Rows, packed: Packed, out: DTypeLike) -> Float[Array, "T N"]:
    """`rounded(dense(rows)) @ unpack(packed)`, of what `quantized_product.supports`."""
    values, scales, offsets, zero = packed
    lanes, x = native.lanes(), jax.eval_shape(dense, rows)
    num_rows, depth = x.shape
    bits = 4 if values.dtype == jnp.uint32 else 8
    stored = PackedNumbers(bits, scales.dtype.name, offsets is not None, zero, lanes)
    weight_group = depth // scales.shape[1]
    group = row_group(weight_group)
    eps = rows.eps if isinstance(rows, Normed) else None
    rounding = Rounding(x.dtype.name, group, lanes, in_words=bits == 4, gated=isinstance(rows, Gated), eps=eps)
    most = 8 if lanes == 16 else 2
    tile = -(-num_rows // -(-num_rows // most))
    num_bytes = depth // group * (group + FACTOR_BYTES)
    arguments = [array.astype(x.dtype).reshape(-1, depth * (1 + rounding.gated)) for array in jax.tree.leaves(rows)]
    near = native.call(rounding, jax.ShapeDtypeStruct((num_rows, num_bytes), jnp.int8), *arguments)
    kernel = _Int8Product(tile, num_rows == tile, jnp.dtype(out).name, group, weight_group // group, stored)
    operands = (near, values, scales, *(() if offsets is None else (offsets,)))
    return native.call(kernel, jax.ShapeDtypeStruct((num_rows, len(values) * WIDTH), out), *operands)


@dataclass(frozen=True)
class _Int8Product:
    """Operands: rounded rows, values, scales, and offsets if there are any. An item is a block of columns of some rows.

    Attributes:
        tile: rows whose sums of a group are in registers; there are as many at least.
        is_all: whether there are no more.
        out: name of the result's type.
        group: numbers of a row with one scale.
        ratio: groups of a row in one of the weight.
        stored: how the weight is.
    """

    tile: int
    is_all: bool
    out: str
    group: int
    ratio: int
    stored: PackedNumbers

    @property
    def name(self) -> str:
        return f"int8_product_{self.tile}_{self.is_all}_{self.out}_{self.group}_{self.ratio}_{self.stored}"

    def num_items(self, code: Code) -> Any:
        return code.builder.mul(code.dim(1, 0), row_parts(code))

    def item(self, code: Code, index: Any) -> None:
        b, num_rows, blocks = code.builder, code.dim(0, 0), code.dim(1, 0)
        part, block = b.sdiv(index, blocks), b.srem(index, blocks)
        if self.is_all:
            self._tile(code, block, I64(0))
            return
        num_tiles, parts = b.sdiv(b.add(num_rows, I64(self.tile - 1)), I64(self.tile)), row_parts(code)
        first, end = (b.sdiv(b.mul(num_tiles, number), parts) for number in (part, b.add(part, I64(1))))
        with code.loop(first, end) as tile:  # the last one begins early
            self._tile(code, block, code.least(b.mul(tile, I64(self.tile)), b.sub(num_rows, I64(self.tile))))

    def _tile(self, code: Code, block: Any, row: Any) -> None:
        """Multiply the rows of a tile, from `row` on."""
        b, lanes, groups, line = code.builder, self.stored.lanes, code.dim(2, 1), code.dim(0, 1)
        xs = [code.at(code.arg(0), b.mul(b.add(row, I64(more)), line)) for more in range(self.tile)]
        group_bytes = self.group * WIDTH * self.stored.bits // 8
        values = code.at(code.arg(1), b.mul(b.mul(block, groups), I64(self.ratio * group_bytes)))
        totals = [zeros(code, WIDTH // lanes, lanes) for _ in xs]
        with code.loop(I64(0), groups) as number, code.loop(I64(0), I64(self.ratio)) as part:
            nth = b.add(b.mul(number, I64(self.ratio)), part)
            parts = [code.at(x, b.mul(nth, I64(self.group + FACTOR_BYTES))) for x in xs]
            sums = self._sums(code, parts, code.at(values, b.mul(nth, I64(group_bytes))))
            self._add(code, totals, sums, parts, b.mul(b.add(b.mul(block, groups), number), I64(WIDTH)))
        columns = b.mul(code.dim(1, 0), I64(WIDTH))
        for more, vectors in enumerate(totals):
            place = b.add(b.mul(b.add(row, I64(more)), columns), b.mul(block, I64(WIDTH)))
            for part, total in enumerate(vectors):
                store(code, total.get(), b.add(place, I64(part * lanes)), self.out)

    def _sums(self, code: Code, xs: list[Any], values: Any) -> list[list[Any]]:
        """For every row and vector of columns, the sum over a group."""
        b, lanes = code.builder, self.stored.lanes
        bias = self.stored.zero + (_SIGN if self.stored.bits == 8 else 0)
        width, words = 32 * lanes, ir.VectorType(I32, lanes)

        def start(x: Any) -> list[Any]:
            if not bias:
                return [words([0] * lanes)] * (WIDTH // lanes)
            total = b.mul(code.load(x, self.group + 8, I32, of=I8), I32(-bias))
            return [code.splat(total, lanes)] * (WIDTH // lanes)

        if self.is_all:
            for ahead in range(0, self.group * WIDTH * self.stored.bits // 8, 64):
                code.prefetch(code.at(values, AHEAD_BYTES + ahead))
        sums = [start(x) for x in xs]
        for place, weights in enumerate(self._weights(code, values)):
            for row, x in enumerate(xs):
                four = code.splat(code.load(x, 4 * place, I32, of=I8), lanes)
                sums[row] = [
                    code.call(f"llvm.x86.avx512.vpdpbusd.{width}", words, total, weight, four)
                    for total, weight in zip(sums[row], weights, strict=True)
                ]
        return sums

    def _weights(self, code: Code, values: Any) -> Iterator[list[Any]]:
        """For every four bytes of a row, their weights in vectors of columns: unsigned bytes, four in a word."""
        b, lanes, parts = code.builder, self.stored.lanes, range(WIDTH // self.stored.lanes)
        words = ir.VectorType(I32, lanes)
        if self.stored.bits == 4:
            low, four = words([0x0F0F0F0F] * lanes), words([4] * lanes)
            for k in range(0, self.group, STEP):
                packed = self.stored.words(code, values, I64(k), len(parts))
                yield [b.and_(word, low) for word in packed]
                yield [b.and_(b.lshr(word, four), low) for word in packed]
            return
        two_rows, columns = ir.VectorType(I8, 2 * WIDTH), range(lanes)
        for k in range(0, self.group, 4):
            upper, lower = (code.load(values, (k + more) * WIDTH, two_rows, of=I8) for more in (0, 2))
            for_parts = list[Any]()
            for part in parts:
                order = [row * WIDTH + part * lanes + column for column in columns for row in range(4)]
                signed = code.shuffle(upper, lower, order)
                for_parts.append(b.bitcast(b.xor(signed, signed.type([_SIGN] * signed.type.count)), words))
            yield for_parts

    def _add(self, code: Code, totals: Any, sums: list[list[Any]], xs: list[Any], place: Any) -> None:
        """Add the sums of a group, times the scales of weight and row, and the offsets times the sum of the row."""
        b, lanes, parts = code.builder, self.stored.lanes, WIDTH // self.stored.lanes
        scales = self.stored.factors(code, 2, place, parts)
        offsets = self.stored.factors(code, 3, place, parts) if self.stored.has_offsets else None
        for row, x in enumerate(xs):
            scale, total = (code.splat(code.load(x, self.group + at, F32, of=I8), lanes) for at in (0, 4))
            for part in range(parts):
                wide = b.sitofp(sums[row][part], ir.VectorType(F32, lanes))
                result = code.fma(b.fmul(wide, scales[part]), scale, totals[row][part].get())
                totals[row][part].set(result if offsets is None else code.fma(offsets[part], total, result))
