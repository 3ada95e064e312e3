"""LLVM code of the CPU kernels, made with llvmlite: loops, vectors, and the frame in which XLA passes buffers.

A kernel is a `Kernel`: independent items of work, each a call of `item`. `threads.handler` wraps it into a function of
XLA's typed foreign function interface (`xla/ffi/api/c_api.h`, whose struct offsets stand here and there).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from jinfercept.cpu_kernels import native

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER = I8.as_pointer()
_ARGS, _RETS = 72, 112  # in a call frame
_DATA, _DIMS = 24, 40  # in a buffer
_EXP = [1 / math.factorial(power) for power in range(6, -1, -1)]  # of the series, from the highest power


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


class Kernel(Protocol):
    """Emits the code of a kernel."""

    @property
    def name(self) -> str:
        """The name of its variant: equal names have equal code."""
        ...

    def num_items(self, code: "Code") -> Any:
        """The number of items, i64."""
        ...

    def item(self, code: "Code", index: Any) -> None:
        """The work of one item."""
        ...


@dataclass(frozen=True, slots=True)
class Variable:
    """A local variable, which LLVM keeps in a register."""

    builder: Any
    place: Any

    def get(self) -> Any:
        return self.builder.load(self.place)

    def set(self, value: Any) -> None:
        self.builder.store(value, self.place)


class Code:
    """Emits one function; `frame`, its first argument, is the call frame whose buffers it reads."""

    def __init__(self, function: ir.Function) -> None:
        self.function, self.frame = function, function.args[0]
        self.builder: Any = ir.IRBuilder(function.append_basic_block("entry"))

    def variable(self, initial: Any) -> Variable:
        with self.builder.goto_entry_block():
            place = self.builder.alloca(initial.type)
        self.builder.store(initial, place)
        return Variable(self.builder, place)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """The body runs for every index from start to before stop, all i64."""
        index = self.variable(start)
        with self.loop_while(lambda: self.builder.icmp_signed("<", index.get(), stop)):
            now = index.get()
            yield now
            index.set(self.builder.add(now, I64(step)))

    @contextmanager
    def loop_while(self, condition: Callable[[], Any]) -> Iterator[None]:
        """The body runs as long as the condition, emitted before it, holds."""
        head, body, end = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition(), body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def at(self, base: Any, offset: Any, type: ir.Type = I8) -> Any:
        """The address `offset` elements of `type` behind `base`, as a pointer to it."""
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.builder.gep(self.builder.bitcast(base, type.as_pointer()), [offset])

    def load(self, base: Any, offset: Any, type: ir.Type, *, of: ir.Type | None = None) -> Any:
        """A value of `type`, `offset` elements of type `of` (default: `type`) behind `base`; vectors need no alignment."""
        place = self.builder.bitcast(self.at(base, offset, of or type), type.as_pointer())
        return self.builder.load(place, align=_align(type))

    def store(self, value: Any, base: Any, offset: Any, *, of: ir.Type | None = None) -> None:
        """The inverse of `load`."""
        place = self.builder.bitcast(self.at(base, offset, of or value.type), value.type.as_pointer())
        self.builder.store(value, place, align=_align(value.type))

    def call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Call an external function or an intrinsic of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        declared = self.function.module.globals.get(name)
        return self.builder.call(declared or ir.Function(self.function.module, kind, name), arguments)

    def prefetch(self, place: Any) -> None:
        """Ask for the cache line of an address, which need not be one of an array.

        It goes to the second-level cache: asked into the first, whose few open requests it would hold, it stops other loads.
        """
        self.call("llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(2), I32(1))

    def splat(self, value: Any, lanes: int) -> Any:
        """A vector of equal numbers."""
        lane = self.builder.insert_element(ir.VectorType(value.type, lanes)(ir.Undefined), value, I32(0))
        return self.builder.shuffle_vector(lane, lane, ir.VectorType(I32, lanes)([0] * lanes))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x · y + z."""
        suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{suffix}", x.type, x, y, z)

    def shuffle(self, x: Any, y: Any, order: list[int]) -> Any:
        """The numbers of two vectors at these places, those of `y` after those of `x`."""
        return self.builder.shuffle_vector(x, y, ir.VectorType(I32, len(order))(order))

    def in_pairs(self, upper: Any, lower: Any) -> list[Any]:
        """Pairs of the same column of two rows of 32, half of the columns in each vector: one instruction leaves them so."""
        by_lane = [[8 * lane + place + 32 * row for place in range(4) for row in range(2)] for lane in range(4)]
        return [
            self.shuffle(upper, lower, [4 * half + place for lane in by_lane for place in lane]) for half in range(2)
        ]

    def in_order(self, halves: list[Any]) -> list[Any]:
        """The numbers of all columns, of those that belong to the vectors of `in_pairs`; of several of these."""
        columns = [8 * lane + 4 * side + place for side in range(2) for lane in range(4) for place in range(4)]
        orders = [[columns.index(16 * half + place) for place in range(16)] for half in range(2)]
        return [self.shuffle(*two, order) for two in zip(halves[::2], halves[1::2], strict=True) for order in orders]

    def least(self, x: Any, y: Any) -> Any:
        """The smaller one of two whole numbers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def folded(self, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
        """One number of all numbers of some vectors; `join` makes one of two, of vectors too."""
        whole = vectors[0]
        for vector in vectors[1:]:
            whole = join(whole, vector)
        while (half := whole.type.count // 2) > 1:
            whole = join(*(self.shuffle(whole, whole, list(range(first, first + half))) for first in (0, half)))
        return join(*(self.builder.extract_element(whole, I32(place)) for place in range(2)))

    def wide(self, base: Any, offset: Any, lanes: int, number: ir.Type) -> Any:
        """A vector of float32, of numbers that are float32 or bfloat16."""
        vector = self.load(base, offset, ir.VectorType(number, lanes), of=number)
        return vector if number == F32 else self.builder.fpext(vector, ir.VectorType(F32, lanes))

    def narrow(self, values: Any) -> Any:
        """A vector of float32 rounded to bfloat16: to the nearest number, of two to the even one.

        Without an instruction for it LLVM calls a function that not every process has.
        """
        b, count = self.builder, values.type.count
        if {"avx512bf16", "avxneconvert"} & native.features():
            return b.fptrunc(values, ir.VectorType(BF16, count))
        words = ir.VectorType(I32, count)
        bits, high = b.bitcast(values, words), words([16] * count)
        upper = b.lshr(bits, high)
        is_odd = b.and_(upper, words([1] * count))
        rounded = b.lshr(b.add(bits, b.add(is_odd, words([0x7FFF] * count))), high)
        quiet_nan = b.or_(upper, words([0x40] * count))
        chosen = b.select(b.fcmp_unordered("uno", values, values), quiet_nan, rounded)
        return b.bitcast(b.trunc(chosen, ir.VectorType(I16, count)), ir.VectorType(BF16, count))

    def sums_of_four(self, vectors: list[Any]) -> Any:
        """The sums of each of four vectors' numbers, as one vector."""
        whole = self.parts_of_four(vectors)
        while (lanes := whole.type.count // 2) >= 4:
            parts = (self.shuffle(whole, whole, list(range(first, first + lanes))) for first in (0, lanes))
            whole = self.builder.fadd(*parts)
        return whole

    def parts_of_four(self, vectors: list[Any]) -> Any:
        """Four sums for every 128 bits of four vectors, whose sums are the four vectors'."""
        first, second, third, fourth = vectors
        low, high = [0, 4, 1, 5], [2, 6, 3, 7]
        halves = self._folded(first, second, low, high), self._folded(third, fourth, low, high)
        return self._folded(*halves, [0, 1, 4, 5], [2, 3, 6, 7])

    def sums_of_parts(self, parts: list[Any]) -> Any:
        """One vector of the sums that the results of `parts_of_four` have, in their order; as many as a vector has 128 bits."""
        while len(parts) > 1:
            numbers = range(2 * parts[0].type.count)
            orders = [[number for number in numbers if number // 4 % 2 == half] for half in (0, 1)]
            folds = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.builder.fadd(*(self.shuffle(x, y, order) for order in orders)) for x, y in folds]
        return parts[0]

    def _folded(self, x: Any, y: Any, low: list[int], high: list[int]) -> Any:
        """The sum of two choices of four numbers of every 128 bits; 4 to 7 are those of `y`."""
        lanes = x.type.count
        orders = [
            [first + place % 4 + lanes * (place // 4) for first in range(0, lanes, 4) for place in places]
            for places in (low, high)
        ]
        return self.builder.fadd(*(self.shuffle(x, y, order) for order in orders))

    def exp(self, x: Any) -> Any:
        """e to the power of a vector's numbers, none above 0: within 2e-7 of the result; 0 for numbers below -87."""
        b, kind = self.builder, x.type
        vector = ir.VectorType(I32, kind.count)

        def every(number: float) -> Any:
            return kind([number] * kind.count)

        scaled = b.fmul(x, every(math.log2(math.e)))
        whole = self.call(f"llvm.rint.v{kind.count}f32", kind, scaled)
        rest = b.fmul(b.fsub(scaled, whole), every(math.log(2)))
        power = every(_EXP[0])
        for factor in _EXP[1:]:
            power = self.fma(power, rest, every(factor))
        exponent = b.shl(b.fptosi(whole, vector), vector([23] * kind.count))
        result = b.bitcast(b.add(b.bitcast(power, vector), exponent), kind)
        return b.select(b.fcmp_ordered(">", x, every(-87.0)), result, every(0.0))

    def capped(self, x: Any, cap: float) -> Any:
        """`cap * tanh(x / cap)` of a vector's numbers."""
        b, kind = self.builder, x.type
        size = self.call(f"llvm.fabs.v{kind.count}f32", kind, x)
        fade = self.exp(b.fmul(size, kind([-2 / cap] * kind.count)))
        whole = kind([cap] * kind.count)
        tanh = b.fdiv(self.fma(b.fneg(whole), fade, whole), b.fadd(fade, kind([1.0] * kind.count)))
        return self.call(f"llvm.copysign.v{kind.count}f32", kind, tanh, x)

    def arg(self, index: int) -> Any:
        """Address of an operand's numbers."""
        return self.load(self._buffer(_ARGS, index), _DATA, POINTER, of=I8)

    def ret(self, index: int) -> Any:
        """Address of a result's numbers."""
        return self.load(self._buffer(_RETS, index), _DATA, POINTER, of=I8)

    def dim(self, index: int, axis: int) -> Any:
        """Length of an operand's axis, i64."""
        return self.load(self.load(self._buffer(_ARGS, index), _DIMS, POINTER, of=I8), axis, I64)

    def _buffer(self, offset: int, index: int) -> Any:
        return self.load(self.load(self.frame, offset, POINTER, of=I8), index, POINTER)


def _align(type: ir.Type) -> int:
    """Bytes of one number."""
    number = type.element if isinstance(type, ir.VectorType) else type
    return (
        2
        if number == BF16 or number == ir.HalfType()
        else 4
        if number == F32
        else number.width // 8
        if isinstance(number, ir.IntType)
        else 8
    )
