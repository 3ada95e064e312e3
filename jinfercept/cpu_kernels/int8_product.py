"""Products of rows that are rounded to int8 with weights of 4 or 8 bits, by instructions that multiply bytes.

Neighbouring numbers of a row, a group, have one scale, by which the largest of them is 127. A first kernel rounds the rows, and
computes them too if a norm or a gate is before them. Products of a group are summed as whole numbers, groups in float32, always
in the same order. So the product of a row has the same bits whatever other rows are beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import F32, I8, I32, TYPES, Buffer, Code, Value, Variable, results
from jinfercept.cpu_kernels.packed_product import AHEAD_BYTES, STEP, PackedNumbers
from jinfercept.cpu_kernels.tiles import row_parts, row_tiles
from jinfercept.pallas.layouts.packed_weights import ORDER, WIDTH, Packed, row_group
from jinfercept.pallas.layouts.rows import Gated, Normed, Rows, dense

FACTOR_BYTES = 12
"""Behind the bytes of a group: its scale, the sum of its rounded numbers times the scale, and that sum, as int32."""
ROWS_AT_ONCE = 16
"""Rows that an item rounds."""
_SMALLEST = 1e-30
"""A group whose numbers are all smaller is rounded to zeros."""
_ROUNDER, _ROUNDER_BITS = 1.5 * 2**23, 0x4B400000
"""A float32 to which a smaller number is added as a whole one, in its lowest bits; and its bits."""
_BYTES_OF_WORDS = [ORDER[2 * byte + half] for half in range(2) for byte in range(4)]
"""Inputs of the bytes of a word's lower, and then of its upper numbers."""
_SIGN = 128
"""Added to 8-bit weights, which the instruction takes without a sign."""


def usable() -> bool:
    """Whether this CPU multiplies bytes and adds them up in vectors as wide as its widest."""
    needed = "avx512vnni" if native.lanes() == 16 else "avxvnni"
    return native.usable() and needed in native.features()


def product(rows: Rows, packed: Packed, out: DTypeLike) -> Float[Array, "T N"]:
    """`rounded(dense(rows)) @ unpack(packed)`, for arguments that `quantized.supports` accepts."""
    values, scales, offsets, zero = packed
    lanes, x = native.lanes(), jax.eval_shape(dense, rows)
    num_rows, depth = x.shape
    bits = 4 if values.dtype == jnp.uint32 else 8
    stored = PackedNumbers(bits, scales.dtype.name, offsets is not None, zero, lanes)
    weight_group = depth // scales.shape[1]
    group = row_group(weight_group)
    eps = rows.eps if isinstance(rows, Normed) else None
    rounding = _Rounding(x.dtype.name, group, lanes, in_words=bits == 4, gated=isinstance(rows, Gated), eps=eps)
    most = 8 if lanes == 16 else 2
    tile = -(-num_rows // -(-num_rows // most))
    num_bytes = depth // group * (group + FACTOR_BYTES)
    arguments = [array.astype(x.dtype).reshape(-1, depth * (1 + rounding.gated)) for array in jax.tree.leaves(rows)]
    near = native.call(rounding, jax.ShapeDtypeStruct((num_rows, num_bytes), jnp.int8), *arguments)
    kernel = _Int8Product(tile, num_rows == tile, jnp.dtype(out).name, group, weight_group // group, stored)
    operands = (near, values, scales, *(() if offsets is None else (offsets,)))
    return native.call(kernel, jax.ShapeDtypeStruct((num_rows, len(values) * WIDTH), out), *operands)


@dataclass(frozen=True)
class _Rounding:
    """Rounds rows: for each group its bytes, and the factors behind them. Operands: what the rows are computed from.

    Attributes:
        group: neighbouring numbers with one scale.
        in_words: whether the bytes have the order in which words of eight 4-bit numbers are taken apart.
        gated: whether they are `Gated`: each row has its gates in front.
        eps: of rows that are `Normed`, for which there is a second operand; None: they are not.
    """

    dtype: str
    group: int
    lanes: int
    in_words: bool
    gated: bool
    eps: float | None

    def num_items(self, code: Code) -> Value:
        return code.dim(0, 0).tiles(ROWS_AT_ONCE)

    def item(self, code: Code, index: Value) -> None:
        columns = code.dim(0, 1)
        depth = columns // (1 + self.gated)
        groups = depth // self.group
        first, end = (index + more for more in (0, 1))
        with code.loop(first * ROWS_AT_ONCE, code.least(end * ROWS_AT_ONCE, code.dim(0, 0))) as row:
            start = row * columns
            factor = None if self.eps is None else self._norm(code, self.eps, start, groups)
            with code.loop(0, groups) as nth:
                place = nth * self.group
                parts = self._parts(code, 0, start + place)
                if self.gated:
                    ups = self._parts(code, 0, start + depth + place)
                    parts = [_silu(code, gate) * up for gate, up in zip(parts, ups, strict=True)]
                if factor is not None:
                    scales = self._parts(code, 1, place)
                    parts = [x * factor * scale for x, scale in zip(parts, scales, strict=True)]
                self._round(code, parts, code.ret(0, I8) + (row * groups + nth) * (self.group + FACTOR_BYTES))

    def _parts(self, code: Code, operand: int, place: Value) -> list[Value]:
        x = code.arg(operand, TYPES[self.dtype]) + place
        return [x.vector(start, self.lanes).to(F32) for start in range(0, self.group, self.lanes)]

    def _norm(self, code: Code, eps: float, start: Value, groups: Value) -> Value:
        sums = code.sums(self.group // self.lanes, self.lanes)
        with code.loop(0, groups) as nth:
            for total, x in zip(sums, self._parts(code, 0, start + nth * self.group), strict=True):
                total.value = total.value.with_products(x, x)
        mean = code.folded(results(sums), Value.__add__) / (groups * self.group).to(F32)
        return (1.0 / code.math("sqrt", mean + eps)).broadcast(self.lanes)

    def _round(self, code: Code, parts: list[Value], to: Buffer) -> None:
        sizes = [part.bits(I32) & 0x7FFFFFFF for part in parts]
        most = code.folded(sizes, lambda x, y: code.where(x > y, x, y)).bits(F32)
        inverse = code.where(most > _SMALLEST, 127.0 / most, 0.0).broadcast(self.lanes)
        near = [(part * inverse + _ROUNDER).bits(I32) for part in parts]
        total = code.folded([part - _ROUNDER_BITS for part in near], Value.__add__)
        joined = [part.to(I8) for part in near]
        while len(joined) > 1:
            pairs = zip(joined[::2], joined[1::2], strict=True)
            joined = [code.shuffle(x, y, [*range(2 * x.lanes)]) for x, y in pairs]
        if self.in_words:
            order = [8 * word + row for word in range(self.group // 8) for row in _BYTES_OF_WORDS]
            joined = [code.shuffle(joined[0], joined[0], order)]
        to[0] = joined[0]
        scale, factors = most * (1 / 127), (to + self.group).of(F32)
        factors[0], factors[1], factors.of(I32)[2] = scale, scale * total.to(F32), total


def _silu(code: Code, x: Value) -> Value:
    power = code.exp(-code.math("fabs", x))
    return x * code.where(x >= 0.0, 1.0, power) / (power + 1.0)


@dataclass(frozen=True)
class _Int8Product:
    """Operands: rounded rows, values, scales, and offsets if there are any. An item is a block of columns of some rows.

    Attributes:
        tile: rows whose sums of a group are in registers; there are as many at least.
        is_all: whether there are no more.
        group: numbers of a row with one scale.
        ratio: groups of a row in one of the weight.
    """

    tile: int
    is_all: bool
    out: str
    group: int
    ratio: int
    stored: PackedNumbers

    def num_items(self, code: Code) -> Value:
        return code.dim(1, 0) * row_parts(code)

    def item(self, code: Code, index: Value) -> None:
        blocks = code.dim(1, 0)
        part, block = index // blocks, index % blocks
        if self.is_all:
            self._tile(code, block, code.number(0))
            return
        with row_tiles(code, part, self.tile) as (_, row):
            self._tile(code, block, row)

    @property
    def _parts(self) -> int:
        return WIDTH // self.stored.lanes

    def _tile(self, code: Code, block: Value, row: Value) -> None:
        groups, line = code.dim(2, 1), code.dim(0, 1)
        xs = [code.arg(0, I8) + (row + more) * line for more in range(self.tile)]
        group_bytes = self.group * WIDTH * self.stored.bits // 8
        values = code.arg(1, I8) + block * groups * (self.ratio * group_bytes)
        totals = [code.sums(self._parts, self.stored.lanes) for _ in xs]
        with code.loop(0, groups) as number, code.loop(0, self.ratio) as part:
            nth = number * self.ratio + part
            parts = [x + nth * (self.group + FACTOR_BYTES) for x in xs]
            sums = self._sums(code, parts, values + nth * group_bytes)
            self._add(code, totals, sums, parts, (block * groups + number) * WIDTH)
        columns = code.dim(1, 0) * WIDTH
        for more, vectors in enumerate(totals):
            place = (row + more) * columns + block * WIDTH
            code.ret(0, TYPES[self.out]).put(place, results(vectors))

    def _sums(self, code: Code, xs: list[Buffer], values: Buffer) -> list[list[Value]]:
        lanes, words = self.stored.lanes, ir.VectorType(I32, self.stored.lanes)
        bias = self.stored.zero + (_SIGN if self.stored.bits == 8 else 0)

        def start(x: Buffer) -> Value:
            if not bias:
                return code.full(lanes, 0, I32)
            return ((x + (self.group + 8)).of(I32)[0] * -bias).broadcast(lanes)

        if self.is_all:
            for ahead in range(0, self.group * WIDTH * self.stored.bits // 8, 64):
                (values + (AHEAD_BYTES + ahead)).prefetch()
        sums = [[start(x)] * self._parts for x in xs]
        for place, weights in enumerate(self._weights(code, values)):
            for row, x in enumerate(xs):
                four = x.of(I32)[place].broadcast(lanes)
                sums[row] = [
                    code.call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", words, total, weight, four)
                    for total, weight in zip(sums[row], weights, strict=True)
                ]
        return sums

    def _weights(self, code: Code, values: Buffer) -> Iterator[list[Value]]:
        """For every four bytes of a row, their weights in vectors of columns: unsigned bytes, four in a word."""
        lanes = self.stored.lanes
        if self.stored.bits == 4:
            for k in range(0, self.group, STEP):
                packed = self.stored.words(values, k, self._parts)
                yield [word & 0x0F0F0F0F for word in packed]
                yield [word >> 4 & 0x0F0F0F0F for word in packed]
            return
        for k in range(0, self.group, 4):
            upper, lower = (values.vector((k + more) * WIDTH, 2 * WIDTH) for more in (0, 2))
            for_parts = list[Value]()
            for first in range(0, WIDTH, lanes):
                order = [row * WIDTH + first + column for column in range(lanes) for row in range(4)]
                for_parts.append((code.shuffle(upper, lower, order) ^ _SIGN).bits(I32))
            yield for_parts

    def _add(
        self, code: Code, totals: list[list[Variable]], sums: list[list[Value]], xs: list[Buffer], place: Value
    ) -> None:
        lanes = self.stored.lanes
        scales = self.stored.factors(code, 2, place, self._parts)
        offsets = self.stored.factors(code, 3, place, self._parts) if self.stored.has_offsets else None
        for row, x in enumerate(xs):
            scale, total = ((x + self.group).of(F32)[at].broadcast(lanes) for at in (0, 1))
            for part, variable in enumerate(totals[row]):
                wide = sums[row][part].to(F32) * scales[part]
                result = variable.value.with_products(wide, scale)
                variable.value = result if offsets is None else result.with_products(offsets[part], total)
