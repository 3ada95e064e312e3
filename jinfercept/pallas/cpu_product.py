"""Products of a few rows with a weight in bfloat16 as it lies: every number of the weight is read once, in order.

An item is a block of the weight's outputs for all rows. Sums are in float32; CPUs with bfloat16 dot products multiply pairs of
numbers, others widen to float32 first.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from llvmlite import ir

from jinfercept.pallas import cpu_kernels
from jinfercept.pallas.cpu_code import BF16, F32, I32, I64, Code, Variable

MOST_ROWS = 32
BLOCK = 32  # numbers in a cache line, and columns in the smallest item
AHEAD = 16  # rows of the weight that are fetched before they are needed


def product(
    x: Float[Array, "T K"], weight: Float[Array, "..."], *, transposed: bool, out: DTypeLike
) -> Float[Array, "T N"]:
    """`x @ weight`, of what `supports`.

    Args:
        x, weight: bfloat16; the weight is `[K, N]`, or `[N, K]` if `transposed`.
        out: type of the result.
    """
    kernel = _Transposed(len(x), jnp.dtype(out).name) if transposed else _Columns(len(x), jnp.dtype(out).name)
    result = jax.ShapeDtypeStruct((len(x), weight.shape[0 if transposed else 1]), out)
    return cpu_kernels.call(kernel, result, x, weight)


def supports(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `product` computes this."""
    few = "avx512bf16" in cpu_kernels.features() and x.ndim == weight.ndim == 2 and len(x) <= MOST_ROWS
    return few and x.dtype == weight.dtype == jnp.bfloat16 and all(size % BLOCK == 0 for size in weight.shape)


F16, W32 = ir.VectorType(F32, 16), ir.VectorType(BF16, 32)


@dataclass(frozen=True)
class _Columns:
    """`[T, K] @ [K, N]`: an item is a block of columns."""

    rows: int
    out: str

    @property
    def name(self) -> str:
        return f"product_columns_{self.rows}_{self.out}"

    @property
    def width(self) -> int:
        """Columns of an item."""
        return BLOCK

    def num_items(self, code: Code) -> Any:
        return code.builder.sdiv(code.dim(1, 1), I64(self.width))

    def item(self, code: Code, index: Any) -> None:
        column = code.builder.mul(index, I64(self.width))
        tile = -(-self.rows // -(-self.rows // 12))
        for first in range(0, self.rows, tile):
            self._tile(code, column, first, min(tile, self.rows - first))

    def _tile(self, code: Code, column: Any, first: int, rows: int) -> None:
        b, depth, columns = code.builder, code.dim(0, 1), code.dim(1, 1)
        x, weight, out = code.arg(0), code.arg(1), code.ret(0)
        sums = [[code.variable(F16([0.0] * 16)) for _ in range(2)] for _ in range(rows)]
        xs = [code.at(x, b.mul(I64(first + row), depth), BF16) for row in range(rows)]
        with code.loop(I64(0), depth, 2) as k:
            place = b.add(b.mul(k, columns), column)
            upper = code.load(weight, place, W32, of=BF16)
            lower = code.load(weight, b.add(place, columns), W32, of=BF16)
            far = b.add(place, b.mul(columns, I64(AHEAD)))
            for line in (far, b.add(far, columns)):
                code.call("llvm.prefetch.p0", ir.VoidType(), code.at(weight, line, BF16), I32(0), I32(3), I32(1))
            pairs = [b.shuffle_vector(upper, lower, ir.VectorType(I32, 32)(_interleaved(half))) for half in range(2)]
            for row in range(rows):
                both = code.splat(code.load(xs[row], k, I32, of=BF16), 16)
                for half in range(2):
                    _add_products(code, sums[row][half], b.bitcast(both, W32), pairs[half])
        for row in range(rows):
            low, high = (total.get() for total in sums[row])
            for half in range(2):
                whole = b.shuffle_vector(low, high, ir.VectorType(I32, 16)(_ordered(half)))
                if self.out == "bfloat16":
                    whole = b.fptrunc(whole, ir.VectorType(BF16, 16))
                offset = b.add(b.mul(I64(first + row), columns), b.add(column, I64(16 * half)))
                code.store(whole, out, offset, of=BF16 if self.out == "bfloat16" else F32)


def _interleaved(half: int) -> list[int]:
    """Pairs of the same column of two rows, in the order in which one instruction leaves them: by 128-bit lanes."""
    return [8 * lane + 4 * half + place + 32 * row for lane in range(4) for place in range(4) for row in range(2)]


def _ordered(half: int) -> list[int]:
    """Columns in order, of sums of the pairs of both halves."""
    columns = [8 * lane + 4 * half_ + place for half_ in range(2) for lane in range(4) for place in range(4)]
    return [columns.index(16 * half + place) for place in range(16)]


@dataclass(frozen=True)
class _Transposed:
    """`[T, K] @ [N, K]ᵀ`: an item is a block of the weight's rows."""

    rows: int
    out: str

    @property
    def name(self) -> str:
        return f"product_rows_{self.rows}_{self.out}"

    def num_items(self, code: Code) -> Any:
        return code.builder.sdiv(code.dim(1, 0), I64(BLOCK))

    def item(self, code: Code, index: Any) -> None:
        start = code.builder.mul(index, I64(BLOCK))
        tile = -(-self.rows // -(-self.rows // 6))
        for first in range(0, self.rows, tile):
            with code.loop(start, code.builder.add(start, I64(BLOCK)), 4) as n:
                self._tile(code, n, first, min(tile, self.rows - first))

    def _tile(self, code: Code, n: Any, first: int, rows: int) -> None:
        b, depth, columns = code.builder, code.dim(0, 1), code.dim(1, 0)
        x, weight, out = code.arg(0), code.arg(1), code.ret(0)
        xs = [code.at(x, b.mul(I64(first + row), depth), BF16) for row in range(rows)]
        ws = [code.at(weight, b.mul(b.add(n, I64(place)), depth), BF16) for place in range(4)]
        sums = [[code.variable(F16([0.0] * 16)) for _ in ws] for _ in xs]
        with code.loop(I64(0), depth, 32) as k:
            theirs = [code.load(w, k, W32, of=BF16) for w in ws]
            for row in range(rows):
                ours = code.load(xs[row], k, W32, of=BF16)
                for total, w in zip(sums[row], theirs, strict=True):
                    _add_products(code, total, ours, w)
        for row in range(rows):
            four = _sums_of_four(code, [total.get() for total in sums[row]])
            if self.out == "bfloat16":
                four = b.fptrunc(four, ir.VectorType(BF16, 4))
            offset = b.add(b.mul(I64(first + row), columns), n)
            code.store(four, out, offset, of=BF16 if self.out == "bfloat16" else F32)


def _add_products(code: Code, total: Variable, x: Any, y: Any) -> None:
    """Add the products of two vectors' numbers, each sum one pair of them."""
    total.set(code.call("llvm.x86.avx512bf16.dpbf16ps.512", F16, total.get(), x, y))


def _sums_of_four(code: Code, vectors: list[Any]) -> Any:
    """The sums of four vectors' numbers, as one vector."""
    b = code.builder

    def picked(x: Any, y: Any, order: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.VectorType(I32, len(order))(order))

    def folded(x: Any, y: Any, low: list[int], high: list[int]) -> Any:
        """By 128-bit lane; numbers 4 to 7 are those of `y`."""
        places = [
            [4 * lane + place % 4 + 16 * (place // 4) for lane in range(4) for place in row] for row in (low, high)
        ]
        return b.fadd(picked(x, y, places[0]), picked(x, y, places[1]))

    first, second, third, fourth = vectors
    low, high = [0, 4, 1, 5], [2, 6, 3, 7]
    halves = folded(first, second, low, high), folded(third, fourth, low, high)
    whole = folded(*halves, [0, 1, 4, 5], [2, 3, 6, 7])
    whole = b.fadd(picked(whole, whole, list(range(8))), picked(whole, whole, list(range(8, 16))))
    return b.fadd(picked(whole, whole, list(range(4))), picked(whole, whole, list(range(4, 8))))
