"""Rounds rows to int8 for `int8_product.py`, where the rows are computed too if a norm or a gate is before them.

Neighbouring numbers of a row, a group, have one scale, by which the largest of them is 127.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from jinfercept.cpu_kernels.code import BF16, F32, I8, I32, I64, Code
from jinfercept.cpu_kernels.tiles import zeros
from jinfercept.layouts.packed_weights import ORDER

FACTOR_BYTES = 12
"""Behind the bytes of a group: its scale, the sum of its rounded numbers times the scale, and that sum, as int32."""
ROWS_AT_ONCE = 16
"""Rows of an item."""
_SMALLEST = 1e-30
"""A group whose numbers are all smaller is rounded to zeros."""
_ROUNDER, _ROUNDER_BITS = 1.5 * 2**23, 0x4B400000
"""A float32 to which a smaller number is added as a whole one, in its lowest bits; and its bits."""
_BYTES_OF_WORDS = [ORDER[2 * byte + half] for half in range(2) for byte in range(4)]
"""Inputs of the bytes of a word's lower, and then of its upper numbers."""


@dataclass(frozen=True)
class Rounding:
    """Rounds rows: for each group its bytes, and the factors behind them. Operands: what the rows are computed from.

    Attributes:
        factors: name of the type of the operands.
        group: neighbouring numbers with one scale.
        lanes: numbers of float32 in a vector.
        in_words: whether the bytes have the order in which words of eight 4-bit numbers are taken apart.
        gated: whether they are `Gated`: each row has its gates in front.
        eps: of rows that are `Normed`, for which there is a second operand; None: they are not.
    """

    factors: str
    group: int
    lanes: int
    in_words: bool
    gated: bool
    eps: float | None

    @property
    def name(self) -> str:
        fields = self.factors, self.group, self.lanes, self.in_words, self.gated, self.eps
        return f"rounding_{'_'.join(map(str, fields))}".replace("-", "m")

    def num_items(self, code: Code) -> Any:
        return code.builder.sdiv(code.builder.add(code.dim(0, 0), I64(ROWS_AT_ONCE - 1)), I64(ROWS_AT_ONCE))

    def item(self, code: Code, index: Any) -> None:
        b, columns = code.builder, code.dim(0, 1)
        depth = b.sdiv(columns, I64(1 + self.gated))
        groups = b.sdiv(depth, I64(self.group))
        first, end = (b.mul(b.add(index, I64(more)), I64(ROWS_AT_ONCE)) for more in (0, 1))
        with code.loop(first, code.least(end, code.dim(0, 0))) as row:
            start = b.mul(row, columns)
            factor = None if self.eps is None else self._norm(code, start, groups)
            with code.loop(I64(0), groups) as nth:
                place = b.mul(nth, I64(self.group))
                parts = self._parts(code, 0, b.add(start, place))
                if self.gated:
                    ups = self._parts(code, 0, b.add(b.add(start, depth), place))
                    parts = [b.fmul(_silu(code, gate), up) for gate, up in zip(parts, ups, strict=True)]
                if factor is not None:
                    scales = self._parts(code, 1, place)
                    parts = [b.fmul(b.fmul(x, factor), scale) for x, scale in zip(parts, scales, strict=True)]
                group = b.add(b.mul(row, groups), nth)
                self._round(code, parts, code.at(code.ret(0), b.mul(group, I64(self.group + FACTOR_BYTES))))

    def _parts(self, code: Code, operand: int, place: Any) -> list[Any]:
        """The vectors of a group of an operand."""
        number = BF16 if self.factors == "bfloat16" else F32
        x = code.at(code.arg(operand), place, number)
        return [code.wide(x, I64(start), self.lanes, number) for start in range(0, self.group, self.lanes)]

    def _norm(self, code: Code, start: Any, groups: Any) -> Any:
        """The factor of the numbers of a row, which begins at `start`, as a vector of equal numbers."""
        b, sums = code.builder, zeros(code, self.group // self.lanes, self.lanes)
        with code.loop(I64(0), groups) as nth:
            for total, x in zip(sums, self._parts(code, 0, b.add(start, b.mul(nth, I64(self.group)))), strict=True):
                total.set(code.fma(x, x, total.get()))
        total = code.folded([total.get() for total in sums], b.fadd)
        mean = b.fdiv(total, b.sitofp(b.mul(groups, I64(self.group)), F32))
        root = code.call("llvm.sqrt.f32", F32, b.fadd(mean, F32(self.eps)))
        return code.splat(b.fdiv(F32(1.0), root), self.lanes)

    def _round(self, code: Code, parts: list[Any], to: Any) -> None:
        b, lanes = code.builder, self.lanes
        words, wide = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        sizes = [b.and_(b.bitcast(part, words), words([0x7FFFFFFF] * lanes)) for part in parts]
        most = b.bitcast(code.folded(sizes, lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)), F32)
        inverse = b.select(b.fcmp_ordered(">", most, F32(_SMALLEST)), b.fdiv(F32(127.0), most), F32(0.0))
        factor, rounder = code.splat(inverse, lanes), wide([_ROUNDER] * lanes)
        near = [b.bitcast(b.fadd(b.fmul(part, factor), rounder), words) for part in parts]
        numbers = [b.sub(part, words([_ROUNDER_BITS] * lanes)) for part in near]
        total = code.folded(numbers, b.add)
        joined = [b.trunc(part, ir.VectorType(I8, lanes)) for part in near]
        while len(joined) > 1:
            pairs = zip(joined[::2], joined[1::2], strict=True)
            joined = [code.shuffle(x, y, list(range(2 * x.type.count))) for x, y in pairs]
        if self.in_words:
            order = [8 * word + row for word in range(self.group // 8) for row in _BYTES_OF_WORDS]
            joined = [code.shuffle(joined[0], joined[0], order)]
        code.store(joined[0], to, 0, of=I8)
        scale = b.fmul(most, F32(1 / 127))
        factors = (scale, b.fmul(scale, b.sitofp(total, F32)), total)
        for place, factor in enumerate(factors):
            code.store(factor, to, self.group + 4 * place, of=I8)


def _silu(code: Code, x: Any) -> Any:
    """x times its logistic function, of a vector's numbers."""
    b, kind = code.builder, x.type
    ones = kind([1.0] * kind.count)
    power = code.exp(b.fneg(code.call(f"llvm.fabs.v{kind.count}f32", kind, x)))
    upper = b.select(b.fcmp_ordered(">=", x, kind([0.0] * kind.count)), ones, power)
    return b.fdiv(b.fmul(x, upper), b.fadd(power, ones))
