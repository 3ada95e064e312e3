"""Paged attention of single queries on a CPU: an item is a query token with the query heads of one KV head.

It reads its row's context once, in blocks of as many tokens as a vector has numbers: scores by dot products, online softmax in
float32. Places beyond the context repeat its last token with a weight of 0, so that nothing unwritten is read.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jinfercept.pallas import cpu_kernels
from jinfercept.pallas.cpu_code import BF16, F32, I32, I64, Code
from jinfercept.pallas.layout import Batch, KVPages

NUMBERS = {"float32": F32, "bfloat16": BF16}
MOST_SUMS = 16  # vectors of weighted values that stay in registers
LOWEST = -1e30


def decode_attention(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, num_tokens: Int[Array, ""]
) -> Float[Array, "T H D"]:
    """As `paged_attention_reference` for the first `num_tokens` tokens, zeros for the others; of what `supports`."""
    kernel = _Decode(q.shape[1], q.shape[2], pages.shape[3], q.dtype.name, pages.dtype.name, cpu_kernels.lanes())
    operands = q, pages, batch.positions, batch.query_starts, batch.page_tables, num_tokens
    return cpu_kernels.call(kernel, jax.ShapeDtypeStruct(q.shape, q.dtype), *operands)


def supports(q: jax.Array, pages: jax.Array) -> bool:
    """Whether `decode_attention` computes this."""
    return q.shape[2] % cpu_kernels.lanes() == 0 and q.dtype.name in NUMBERS and pages.dtype.name in NUMBERS


@dataclass(frozen=True)
class _Decode:
    """Operands: queries, pages, positions, query starts, page tables, number of tokens."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    q_type: str
    pages_type: str
    lanes: int

    @property
    def name(self) -> str:
        """See `Kernel`."""
        heads = f"{self.num_heads}_{self.num_kv_heads}_{self.head_dim}"
        return f"decode_{heads}_{self.q_type}_{self.pages_type}_{self.lanes}"

    def num_items(self, code: Code) -> Any:
        return code.builder.mul(code.dim(0, 0), I64(self.num_kv_heads))

    def item(self, code: Code, index: Any) -> None:
        b, group = code.builder, self.num_heads // self.num_kv_heads
        token, kv_head = b.sdiv(index, I64(self.num_kv_heads)), b.srem(index, I64(self.num_kv_heads))
        num_tokens = b.sext(code.load(code.arg(5), 0, I32), I64)
        query = b.mul(b.add(b.mul(token, I64(self.num_heads)), b.mul(kv_head, I64(group))), I64(self.head_dim))
        at_once = max(1, MOST_SUMS * self.lanes // self.head_dim)
        with b.if_else(b.icmp_signed("<", token, num_tokens)) as (used, padding):
            with used:
                row = self._row(code, token)
                for first in range(0, group, at_once):
                    num_queries = min(at_once, group - first)
                    self._queries(code, token, row, kv_head, b.add(query, I64(first * self.head_dim)), num_queries)
            with padding:
                nothing = ir.VectorType(NUMBERS[self.q_type], self.lanes)(None)
                for place in range(0, group * self.head_dim, self.lanes):
                    code.store(nothing, code.ret(0), b.add(query, I64(place)), of=NUMBERS[self.q_type])

    def _row(self, code: Code, token: Any) -> Any:
        """The row that a token belongs to."""
        b, starts, row = code.builder, code.arg(3), code.variable(I64(0))
        with code.loop_while(
            lambda: b.icmp_signed("<=", b.sext(code.load(starts, b.add(row.get(), I64(1)), I32), I64), token)
        ):
            row.set(b.add(row.get(), I64(1)))
        return row.get()

    def _queries(self, code: Code, token: Any, row: Any, kv_head: Any, query: Any, count: int) -> None:
        """Attention of some query heads of one KV head."""
        b, lanes, parts = code.builder, self.lanes, self.head_dim // self.lanes
        vector, number = ir.VectorType(F32, lanes), NUMBERS[self.pages_type]
        context = b.add(b.sext(code.load(code.arg(2), token, I32), I64), I64(1))
        pages, page_size = code.arg(1), code.dim(1, 1)
        table = code.at(code.arg(4), b.mul(row, code.dim(4, 1)), I32)
        own = b.mul(kv_head, I64(self.head_dim))
        asked = [
            [
                code.wide(code.arg(0), b.add(query, I64(h * self.head_dim + p * lanes)), lanes, NUMBERS[self.q_type])
                for p in range(parts)
            ]
            for h in range(count)
        ]
        scale = vector([self.head_dim**-0.5] * lanes)
        tops = [code.variable(F32(LOWEST)) for _ in range(count)]
        totals = [code.variable(vector([0.0] * lanes)) for _ in range(count)]
        sums = [[code.variable(vector([0.0] * lanes)) for _ in range(parts)] for _ in range(count)]
        with b.goto_entry_block():
            places = b.alloca(ir.ArrayType(I64, lanes))
            weights = b.alloca(ir.ArrayType(F32, lanes * count))
        order = vector([float(lane) for lane in range(lanes)])

        with code.loop(I64(0), context, lanes) as first:
            with code.loop(I64(0), I64(lanes)) as lane:
                place = b.add(first, lane)
                last = b.sub(context, I64(1))
                place = b.select(b.icmp_signed("<", place, last), place, last)
                page = b.sext(code.load(table, b.sdiv(place, page_size), I32), I64)
                slot = b.add(b.mul(page, page_size), b.srem(place, page_size))
                code.store(b.add(b.mul(slot, I64(2 * self.num_kv_heads * self.head_dim)), own), places, lane)
            scores = self._scores(code, pages, places, asked, number)
            left = code.splat(b.sitofp(b.sub(context, first), F32), lanes)
            for h in range(count):
                seen = b.select(b.fcmp_ordered("<", order, left), b.fmul(scores[h], scale), vector([LOWEST] * lanes))
                highest = code.call(f"llvm.vector.reduce.fmax.v{lanes}f32", F32, seen)
                top = b.select(b.fcmp_ordered(">", highest, tops[h].get()), highest, tops[h].get())
                fade = code.exp(code.splat(b.fsub(tops[h].get(), top), lanes))
                weight = code.exp(b.fsub(seen, code.splat(top, lanes)))
                tops[h].set(top)
                totals[h].set(code.fma(totals[h].get(), fade, weight))
                for total in sums[h]:
                    total.set(b.fmul(total.get(), fade))
                code.store(weight, weights, h)
            with code.loop(I64(0), I64(lanes)) as lane:
                value = b.add(code.load(places, lane, I64), I64(self.num_kv_heads * self.head_dim))
                values = [code.wide(pages, b.add(value, I64(p * lanes)), lanes, number) for p in range(parts)]
                for h in range(count):
                    weight = code.splat(code.load(weights, b.add(lane, I64(h * lanes)), F32), lanes)
                    for total, part in zip(sums[h], values, strict=True):
                        total.set(code.fma(weight, part, total.get()))

        for h in range(count):
            total = code.sums_of_four([totals[h].get()] * 4)
            whole = code.splat(b.extract_element(total, I32(0)), lanes)
            for p in range(parts):
                mean = b.fdiv(sums[h][p].get(), whole)
                if self.q_type == "bfloat16":
                    mean = b.fptrunc(mean, ir.VectorType(BF16, lanes))
                code.store(mean, code.ret(0), b.add(query, I64(h * self.head_dim + p * lanes)), of=NUMBERS[self.q_type])

    def _scores(self, code: Code, pages: Any, places: Any, asked: list[list[Any]], number: ir.Type) -> list[Any]:
        """For every query head, the unscaled scores of a block's tokens."""
        quarters = [list[Any]() for _ in asked]
        for first in range(0, self.lanes, 4):
            products = [list[Any]() for _ in asked]
            for lane in range(first, first + 4):
                place = code.load(places, lane, I64)
                for part in range(self.head_dim // self.lanes):
                    key = code.wide(pages, code.builder.add(place, I64(part * self.lanes)), self.lanes, number)
                    for row, query in zip(products, asked, strict=True):
                        if part == 0:
                            row.append(code.builder.fmul(query[part], key))
                        else:
                            row[-1] = code.fma(query[part], key, row[-1])
            for row, quarter in zip(products, quarters, strict=True):
                quarter.append(code.sums_of_four(row))
        return [_joined(code, quarter) for quarter in quarters]


def _joined(code: Code, vectors: list[Any]) -> Any:
    """One vector of the numbers of several, in order."""
    while len(vectors) > 1:
        both = list(range(2 * vectors[0].type.count))
        vectors = [code.shuffle(x, y, both) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
