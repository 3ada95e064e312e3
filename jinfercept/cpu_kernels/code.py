"""LLVM code of the CPU kernels, made with llvmlite: numbers and arrays with Python's operators, loops, and XLA's call frame.

A kernel is a `Kernel`: independent items of work, each a call of `item`. `threads.handler` wraps it into a function of XLA's
typed foreign function interface (`xla/ffi/api/c_api.h`, whose struct offsets stand here and there).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from llvmlite import ir

from jinfercept.cpu_kernels import native

I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))
F16, F32, POINTER, VOID = ir.HalfType(), ir.FloatType(), ir.PointerType(), ir.VoidType()
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
TYPES = {"float32": F32, "bfloat16": BF16, "float16": F16, "int8": I8}
"""Types by the names that JAX has for them."""
_SIZES = {I8: 1, F16: 2, BF16: 2, F32: 4, I16: 2, I32: 4, I64: 8, POINTER: 8}  # bytes
type Operand = Value | float


class Kernel(Protocol):
    """Emits the code of a kernel. Its `repr` names the variant: kernels with equal ones have equal code."""

    def num_items(self, code: "Code") -> "Value":
        """The number of items, i64."""
        ...

    def item(self, code: "Code", index: "Value") -> None:
        """The work of one item."""
        ...


def _operator(integer: str, real: str = "") -> Callable[["Value", Operand], "Value"]:
    def emit(self: "Value", other: Operand) -> "Value":
        instruction = integer if isinstance(self.kind, ir.IntType) else real
        return self.code.emit(instruction, self, self.code.number(other, self.type))

    return emit


def _comparison(operator: str) -> Callable[["Value", Operand], "Value"]:
    def emit(self: "Value", other: Operand) -> "Value":
        compare = self.code.builder.icmp_signed if isinstance(self.kind, ir.IntType) else self.code.builder.fcmp_ordered
        return Value(self.code, compare(operator, self.llvm, self.code.number(other, self.type).llvm))

    return emit


class Value:
    """A number or a vector of numbers in the emitted code. Operators emit the instructions that compute them.

    A number of Python in an operation is a constant of the other operand's type, in every place of a vector. Whole numbers
    have a sign; `//` rounds towards zero, `>>` fills up with zeros. No comparison with a NaN is true.
    """

    __slots__ = ("code", "llvm")

    def __init__(self, code: "Code", llvm: Any) -> None:
        self.code, self.llvm = code, llvm

    @property
    def type(self) -> Any:
        return self.llvm.type

    @property
    def lanes(self) -> int:
        return self.type.count

    @property
    def kind(self) -> ir.Type:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __floordiv__, __mod__, __truediv__ = _operator("sdiv"), _operator("srem"), _operator("", "fdiv")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("<", "<=", ">", ">="))
    equals = _comparison("==")

    def __neg__(self) -> "Value":
        return self.code.emit("neg" if isinstance(self.kind, ir.IntType) else "fneg", self)

    def __rtruediv__(self, other: float) -> "Value":
        return self.code.number(other, self.type) / self

    def tiles(self, size: Operand) -> "Value":
        """How many tiles of a size cover this number; the last one may be smaller."""
        return (self + (size - 1)) // size

    def __getitem__(self, place: int) -> "Value":
        return self.code.emit("extract_element", self, I32(place))

    def to(self, kind: ir.Type) -> "Value":
        """The same numbers in another type. Conversion to bfloat16 rounds."""
        if (own := self.kind) == kind:
            return self
        if kind == BF16:
            return self._rounded()
        match isinstance(own, ir.IntType), isinstance(kind, ir.IntType):
            case True, True:
                conversion = "sext" if _SIZES[kind] > _SIZES[own] else "trunc"
            case True, False:
                conversion = "sitofp"
            case False, True:
                conversion = "fptosi"
            case _:
                conversion = "fpext"
        return self._as(conversion, kind)

    def unsigned(self, kind: ir.Type) -> "Value":
        """Whole numbers without a sign in a wider type."""
        return self._as("zext", kind)

    def bits(self, kind: ir.Type) -> "Value":
        """The same bits as numbers of another type, more of them if these are smaller."""
        if isinstance(self.type, ir.VectorType):
            kind = ir.VectorType(kind, self.lanes * _SIZES[self.kind] // _SIZES[kind])
        return self.code.emit("bitcast", self, kind)

    def _as(self, conversion: str, kind: ir.Type) -> "Value":
        if isinstance(self.type, ir.VectorType):
            kind = ir.VectorType(kind, self.lanes)
        return self.code.emit(conversion, self, kind)

    def _rounded(self) -> "Value":
        """A vector of float32 as bfloat16: the nearest number, of two the even one.

        Without an instruction for it LLVM calls a function that not every process has.
        """
        if {"avx512bf16", "avxneconvert"} & native.features():
            return self._as("fptrunc", BF16)
        bits = self.bits(I32)
        upper = bits >> 16
        rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
        is_nan = self.code.builder.fcmp_unordered("uno", self.llvm, self.llvm)
        return self.code.where(Value(self.code, is_nan), upper | 0x40, rounded).to(I16).bits(BF16)

    def broadcast(self, lanes: int) -> "Value":
        """A vector of equal numbers."""
        nothing = Value(self.code, ir.VectorType(self.type, lanes)(ir.Undefined))
        lane = self.code.emit("insert_element", nothing, self, I32(0))
        return self.code.shuffle(lane, lane, [0] * lanes)

    def with_products(self, x: "Value", y: "Value") -> "Value":
        """Add the products of two vectors' numbers to these sums. If `y` has pairs of bfloat16, add those of each pair."""
        if y.kind == BF16:
            return self.code.call("llvm.x86.avx512bf16.dpbf16ps.512", self.type, self, y, x.bits(BF16))
        return self.code.math("fma", x, y, self)


class Variable:
    """A local variable, which LLVM keeps in a register."""

    def __init__(self, code: "Code", initial: Value) -> None:
        self._code = code
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(initial.type)
        self.value = initial

    @property
    def value(self) -> Value:
        return Value(self._code, self._code.builder.load(self._place, typ=self._place.allocated_type))

    @value.setter
    def value(self, value: Value) -> None:
        self._code.builder.store(value.llvm, self._place)


def add_products(totals: list[Variable], x: Value, ys: Sequence[Value]) -> None:
    """Add to each of the sums the products of `x` with one of `ys`."""
    for total, y in zip(totals, ys, strict=True):
        total.value = total.value.with_products(x, y)


def results(variables: Sequence[Variable]) -> list[Value]:
    return [variable.value for variable in variables]


class Buffer:
    """Numbers of one type in memory, one behind the other."""

    __slots__ = ("address", "code", "kind")

    def __init__(self, code: "Code", address: Value, kind: ir.Type) -> None:
        self.code, self.address, self.kind = code, address, kind

    def __getitem__(self, index: Operand) -> Value:
        return self._load(index, self.kind)

    def vector(self, index: Operand, lanes: int) -> Value:
        """A vector of the numbers from `index` on, which needs no alignment."""
        return self._load(index, ir.VectorType(self.kind, lanes))

    def __setitem__(self, index: Operand, value: Value) -> None:
        """Store a number, or a vector from a number on."""
        self.code.builder.store(value.llvm, (self + index).address.llvm, align=_SIZES[self.kind])

    def put(self, index: Operand, vectors: Sequence[Value]) -> None:
        """Store vectors of float32, one behind the other from a number on, in the array's type."""
        for place, vector in enumerate(vectors):
            self[self.code.number(index) + place * vector.lanes] = vector.to(self.kind)

    def __add__(self, offset: Operand) -> "Buffer":
        """The numbers from `offset` on."""
        offsets = [self.code.number(offset).llvm]
        address = self.code.builder.gep(self.address.llvm, offsets, source_etype=self.kind)
        return Buffer(self.code, Value(self.code, address), self.kind)

    def of(self, kind: ir.Type) -> "Buffer":
        """The same memory as numbers of another type."""
        return Buffer(self.code, self.address, kind)

    def prefetch(self) -> None:
        """Ask for the cache line of the first number, which need not be one of an array.

        It goes to the second-level cache. In the first it would hold one of few open requests, and stop other loads.
        """
        self.code.call("llvm.prefetch.p0", VOID, self.address, *(self.code.number(how, I32) for how in (0, 2, 1)))

    def _load(self, index: Operand, kind: ir.Type) -> Value:
        place = (self + index).address.llvm
        return Value(self.code, self.code.builder.load(place, align=_SIZES[self.kind], typ=kind))


class Code:
    """Emits one function; `frame`, its first argument, is the call frame whose buffers it reads."""

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.builder: Any = ir.IRBuilder(function.append_basic_block("entry"))
        self.frame = Buffer(self, Value(self, function.args[0]), I8)

    def emit(self, instruction: str, *operands: Any) -> Value:
        """An instruction of llvmlite's builder with values, types or constants."""
        parts = (operand.llvm if isinstance(operand, Value) else operand for operand in operands)
        return Value(self, getattr(self.builder, instruction)(*parts))

    def number(self, value: Operand, kind: Any = I64) -> Value:
        """A number of Python as a constant of a type, in every place of a vector; a value stays what it is."""
        if isinstance(value, Value):
            return value
        return Value(self, kind([value] * kind.count if isinstance(kind, ir.VectorType) else value))

    def full(self, lanes: int, number: float, kind: ir.Type = F32) -> Value:
        return self.vector([number] * lanes, kind)

    def vector(self, numbers: Sequence[float], kind: ir.Type = F32) -> Value:
        return Value(self, ir.VectorType(kind, len(numbers))(numbers))

    def variable(self, initial: Operand) -> Variable:
        """A variable; a number of Python makes an i64."""
        return Variable(self, self.number(initial))

    def sums(self, count: int, lanes: int) -> list[Variable]:
        """Variables for sums, vectors of zeros."""
        return [self.variable(self.full(lanes, 0.0)) for _ in range(count)]

    def buffer(self, kind: ir.Type, size: Operand, align: int | None = None) -> Buffer:
        """Memory of the function for `size` numbers; its address is a multiple of `align` bytes."""
        if isinstance(size, Value):
            place = self.builder.alloca(kind, size.llvm)
        else:
            with self.builder.goto_entry_block():
                place = self.builder.alloca(ir.ArrayType(kind, int(size)))
        place.align, place.type = align, POINTER
        return Buffer(self, Value(self, place), kind)

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """The body runs for every index from start to before stop, all i64."""
        index = self.variable(start)
        with self.loop_while(lambda: index.value < stop):
            now = index.value
            yield now
            index.value = now + step

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """The body runs as long as the condition, emitted before it, holds."""
        head, body, end = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition().llvm, body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def when(self, condition: Value, *, likely: bool | None = None) -> Any:
        return self.builder.if_then(condition.llvm, likely=likely)

    def where(self, condition: Value, x: Operand, y: Operand) -> Value:
        """`x` where a condition holds, else `y`; one of them is no number of Python."""
        kind = next(value for value in (x, y) if isinstance(value, Value)).type
        return self.emit("select", condition, self.number(x, kind), self.number(y, kind))

    def least(self, x: Operand, y: Operand) -> Value:
        """The smaller one of two whole numbers."""
        x = self.number(x)
        return self.where(x < y, x, y)

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call an external function or an intrinsic of LLVM."""
        operands = [argument.llvm for argument in arguments]
        declared = self.function.module.globals.get(name)
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return Value(self, self.builder.call(declared or ir.Function(self.function.module, kind, name), operands))

    def math(self, name: str, *values: Value) -> Value:
        """A function of LLVM for float32 numbers or vectors."""
        kind = values[0].type
        lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        return self.call(f"llvm.{name}.{lanes}f32", kind, *values)

    def shuffle(self, x: Value, y: Value, order: list[int]) -> Value:
        """The numbers of two vectors at these places, those of `y` after those of `x`."""
        return self.emit("shuffle_vector", x, y, ir.VectorType(I32, len(order))(order))

    def interleaved(self, x: Value, y: Value) -> Value:
        """The numbers of two vectors, one of each in turn."""
        return self.shuffle(x, y, [place for lane in range(x.lanes) for place in (lane, lane + x.lanes)])

    def in_pairs(self, upper: Value, lower: Value) -> list[Value]:
        """Pairs of the same column of two rows of 32, half of the columns in each vector: one instruction leaves them so."""
        by_lane = [[8 * lane + place + 32 * row for place in range(4) for row in range(2)] for lane in range(4)]
        return [
            self.shuffle(upper, lower, [4 * half + place for lane in by_lane for place in lane]) for half in range(2)
        ]

    def in_order(self, halves: list[Value]) -> list[Value]:
        """The numbers of all columns in their order, from vectors that belong to those of `in_pairs`."""
        columns = [8 * lane + 4 * side + place for side in range(2) for lane in range(4) for place in range(4)]
        orders = [[columns.index(16 * half + place) for place in range(16)] for half in range(2)]
        return [self.shuffle(*two, order) for two in zip(halves[::2], halves[1::2], strict=True) for order in orders]

    def folded(self, vectors: list[Value], join: Callable[[Value, Value], Value]) -> Value:
        """Join all numbers of some vectors to one; `join` joins two numbers or two vectors."""
        whole = vectors[0]
        for vector in vectors[1:]:
            whole = join(whole, vector)
        while (half := whole.lanes // 2) > 1:
            whole = join(*(self.shuffle(whole, whole, [*range(first, first + half)]) for first in (0, half)))
        return join(whole[0], whole[1])

    def sums_of_four(self, vectors: list[Value]) -> Value:
        """The sums of each of four vectors' numbers, as one vector."""
        whole = self.parts_of_four(vectors)
        while (lanes := whole.lanes // 2) >= 4:
            lower, upper = (self.shuffle(whole, whole, [*range(first, first + lanes)]) for first in (0, lanes))
            whole = lower + upper
        return whole

    def parts_of_four(self, vectors: list[Value]) -> Value:
        """Four sums for every 128 bits of four vectors, whose sums are the four vectors'."""
        first, second, third, fourth = vectors
        low, high = [0, 4, 1, 5], [2, 6, 3, 7]
        halves = self._added(first, second, low, high), self._added(third, fourth, low, high)
        return self._added(*halves, [0, 1, 4, 5], [2, 3, 6, 7])

    def sums_of_parts(self, parts: list[Value]) -> Value:
        """One vector of the sums that the results of `parts_of_four` have, in their order; as many as a vector has 128 bits."""
        while len(parts) > 1:
            numbers = range(2 * parts[0].lanes)
            low, high = ([number for number in numbers if number // 4 % 2 == half] for half in (0, 1))
            folds = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.shuffle(x, y, low) + self.shuffle(x, y, high) for x, y in folds]
        return parts[0]

    def _added(self, x: Value, y: Value, low: list[int], high: list[int]) -> Value:
        """The sum of two choices of four numbers of every 128 bits; 4 to 7 are those of `y`."""
        lower, upper = (
            [first + place % 4 + x.lanes * (place // 4) for first in range(0, x.lanes, 4) for place in places]
            for places in (low, high)
        )
        return self.shuffle(x, y, lower) + self.shuffle(x, y, upper)

    def exp(self, x: Value) -> Value:
        """e to the power of a vector's numbers, none above 0: within 2e-7 of the result; 0 for numbers below -87."""
        scaled = x * math.log2(math.e)
        whole = self.math("rint", scaled)
        rest = (scaled - whole) * math.log(2)
        power = self.full(x.lanes, _EXP[0])
        for factor in _EXP[1:]:
            power = self.full(x.lanes, factor).with_products(power, rest)
        result = (power.bits(I32) + (whole.to(I32) << 23)).bits(F32)
        return self.where(x > -87.0, result, 0.0)

    def capped(self, x: Value, cap: float) -> Value:
        """`cap * tanh(x / cap)` of a vector's numbers."""
        fade = self.exp(self.math("fabs", x) * (-2 / cap))
        whole = self.full(x.lanes, cap)
        return self.math("copysign", whole.with_products(-whole, fade) / (fade + 1.0), x)

    def arg(self, index: int, kind: ir.Type) -> Buffer:
        return self._buffer(_ARGS, index, _DATA).of(kind)

    def ret(self, index: int, kind: ir.Type) -> Buffer:
        return self._buffer(_RETS, index, _DATA).of(kind)

    def dim(self, index: int, axis: int) -> Value:
        """Length of an operand's axis, i64."""
        return self._buffer(_ARGS, index, _DIMS).of(I64)[axis]

    def _buffer(self, buffers: int, index: int, field: int) -> Buffer:
        buffer = self.pointer(self.pointer(self.frame, buffers), 8 * index)
        return self.pointer(buffer, field)

    def pointer(self, struct: Buffer, offset: int) -> Buffer:
        """The memory to which a struct has a pointer at `offset` bytes."""
        return Buffer(self, (struct + offset).of(POINTER)[0], I8)
