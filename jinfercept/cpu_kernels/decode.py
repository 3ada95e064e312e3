"""Paged attention of single queries on a CPU: an item is a query token with all its heads, or one KV head's if tokens are few.

An item reads its row's context once, in blocks of as many tokens as a vector has numbers: scores by dot products, online
softmax in float32; the next block's lines of memory are fetched meanwhile. Places beyond the context repeat its last token
with a weight of 0, so that nothing unwritten is read.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, POINTER, Code, Variable
from jinfercept.cpu_kernels.tiles import PAIRS, has_pairs
from jinfercept.layouts.pages import Batch, KVPages
from jinfercept.layouts.scoring import PLAIN, Scoring

NUMBERS = {"float32": F32, "bfloat16": BF16}
MOST_SUMS = 16  # vectors of weighted values that stay in registers
LOWEST = -1e30
_LINE = 64  # bytes


def decode_attention(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, num_tokens: Int[Array, ""], scoring: Scoring = PLAIN
) -> Float[Array, "T H D"]:
    """As `paged_attention_reference` for the first `num_tokens` tokens, zeros for the others; of what `supports`."""
    kernel = _Decode(
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        num_kv_heads=pages.shape[3],
        q_type=q.dtype.name,
        pages_type=pages.dtype.name,
        lanes=native.lanes(),
        pairs=has_pairs() and q.dtype == pages.dtype == jnp.bfloat16 and q.shape[2] % PAIRS.count == 0,
        scores=Scores.of(scoring),
    )
    operands = q, pages, batch.positions, batch.query_starts, batch.page_tables, num_tokens, *sinks_of(scoring)
    return native.call(kernel, jax.ShapeDtypeStruct(q.shape, q.dtype), *operands)


def supports(q: jax.Array, pages: jax.Array) -> bool:
    """Whether `decode_attention` computes this."""
    return q.shape[2] % native.lanes() == 0 and q.dtype.name in NUMBERS and pages.dtype.name in NUMBERS


@dataclass(frozen=True)
class Scores:
    """The part of a layer's `Scoring` that is in a kernel's code."""

    window: int | None
    soft_cap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, scoring: Scoring) -> "Scores":
        return cls(scoring.window, scoring.soft_cap, scoring.sinks is not None)

    @property
    def name(self) -> str:
        """The end of a kernel's name; nothing of plain scores."""
        window = "" if self.window is None else f"_window{self.window}"
        cap = "" if self.soft_cap is None else f"_cap{self.soft_cap}"
        return f"{window}{cap}{'_sinks' * self.has_sinks}"

    def begin(self, code: Code, first: Any) -> Any:
        """The first position that a query at position `first`, i64, sees."""
        if self.window is None:
            return I64(0)
        b = code.builder
        begin = b.sub(first, I64(self.window - 1))
        return b.select(b.icmp_signed(">", begin, I64(0)), begin, I64(0))

    def capped(self, code: Code, scores: Any) -> Any:
        return scores if self.soft_cap is None else code.capped(scores, self.soft_cap)


def sinks_of(scoring: Scoring) -> list[Float[Array, "H"]]:
    """A kernel's last operand, if the layer has sinks."""
    return [] if scoring.sinks is None else [scoring.sinks.astype(jnp.float32)]


@dataclass(frozen=True)
class _Decode:
    """Operands: queries, pages, positions, query starts, page tables, number of tokens, sinks if there are any.

    `pairs` multiplies pairs of bfloat16, of a head's numbers with keys and of two tokens with values.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    q_type: str
    pages_type: str
    lanes: int
    pairs: bool
    scores: Scores

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}_{self.num_kv_heads}_{self.head_dim}"
        return f"decode_{heads}_{self.q_type}_{self.pages_type}_{self.lanes}{'_pairs' * self.pairs}{self.scores.name}"

    def num_items(self, code: Code) -> Any:
        return code.builder.mul(code.dim(0, 0), self._parts(code))

    def item(self, code: Code, index: Any) -> None:
        b, parts = code.builder, self._parts(code)
        token, num_kv_heads = b.sdiv(index, parts), b.sdiv(I64(self.num_kv_heads), parts)
        first = b.mul(b.srem(index, parts), num_kv_heads)
        item = _Item(self, code, token, first, b.add(first, num_kv_heads))
        with b.if_else(b.icmp_signed("<", token, self._num_tokens(code))) as (used, padding):
            with used:
                item.attend()
            with padding:
                item.clear()

    def _num_tokens(self, code: Code) -> Any:
        return code.builder.sext(code.load(code.arg(5), 0, I32), I64)

    def _parts(self, code: Code) -> Any:
        """The number of items of a token."""
        few = code.builder.icmp_signed("<", self._num_tokens(code), I64(2 * native.num_threads()))
        return code.builder.select(few, I64(self.num_kv_heads), I64(1))


class BlockPlaces:
    """Emits where the tokens of a row's context are, one block after the other.

    Args:
        table: address of the row's page table.
        page_size: tokens, i64.
        numbers: of a token in a page.
        tokens: of the context, i64.
        begin: the first block's first token, i64.
    """

    def __init__(self, code: Code, table: Any, page_size: Any, numbers: int, tokens: Any, begin: Any) -> None:
        self.code, self.table, self.page_size, self.numbers, self.tokens = code, table, page_size, I64(numbers), tokens
        b = code.builder  # the next token's page in the table, and slot in the page
        self.page, self.slot = code.variable(b.sdiv(begin, page_size)), code.variable(b.srem(begin, page_size))

    def find(self, block: Any, count: Any, places: Any) -> None:
        """Write the first numbers of `count` tokens from `block` on; those beyond the context are its last one."""
        code, b, page, slot = self.code, self.code.builder, self.page, self.slot
        with code.loop(I64(0), count) as lane:
            first = b.mul(b.sext(code.load(self.table, page.get(), I32), I64), self.page_size)
            code.store(b.mul(b.add(first, slot.get()), self.numbers), places, lane)
            more = b.icmp_signed("<", b.add(b.add(block, lane), I64(1)), self.tokens)
            last = b.icmp_signed("==", b.add(slot.get(), I64(1)), self.page_size)
            page.set(b.add(page.get(), b.zext(b.and_(more, last), I64)))
            following = b.select(last, I64(0), b.add(slot.get(), I64(1)))
            slot.set(b.select(more, following, slot.get()))


class _Item:
    """Emits attention of a token with the query heads of the KV heads from `first` to before `end`."""

    def __init__(self, kernel: _Decode, code: Code, token: Any, first: Any, end: Any) -> None:
        b = code.builder
        self.kernel, self.code, self.token, self.first, self.end = kernel, code, token, first, end
        self.lanes, self.head_dim = kernel.lanes, kernel.head_dim
        self.group = kernel.num_heads // kernel.num_kv_heads
        self.vector = ir.VectorType(F32, self.lanes)
        self.number, self.pages = NUMBERS[kernel.pages_type], code.arg(1)
        self.query = b.mul(token, I64(kernel.num_heads * self.head_dim))  # the first number of the token's queries
        with b.goto_entry_block():
            numbers = ir.ArrayType(F32, kernel.num_heads * self.head_dim)
            self.sums = b.alloca(numbers)
            self.totals = b.alloca(ir.ArrayType(F32, kernel.num_heads * self.lanes))
            self.tops = b.alloca(ir.ArrayType(F32, kernel.num_heads))
            self.weights = b.alloca(ir.ArrayType(F32, self.group * self.lanes))
            self.places, self.ahead = (b.alloca(ir.ArrayType(I64, self.lanes)) for _ in range(2))

    def clear(self) -> None:
        """Zeros for a token that is padding."""
        nothing = ir.VectorType(NUMBERS[self.kernel.q_type], self.lanes)(None)
        with self._numbers() as place:
            self._answer(nothing, place)

    def attend(self) -> None:
        """The mean of the values, weighted by the softmax of the scores."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        nothing = self.vector([0.0] * lanes)
        with self._numbers() as place:
            code.store(nothing, self.sums, place, of=F32)
        has_sinks = self.kernel.scores.has_sinks
        initial = self.vector([1.0 if has_sinks else 0.0] + [0.0] * (lanes - 1))
        with self._heads() as head:
            code.store(initial, self.totals, head)
            code.store(code.load(code.arg(6), head, F32) if has_sinks else F32(LOWEST), self.tops, head)
        self._blocks()
        with self._heads() as head:
            total = code.sums_of_four([code.load(self.totals, head, self.vector)] * 4)
            whole = code.splat(b.extract_element(total, I32(0)), lanes)
            start = b.mul(head, I64(self.head_dim))
            for part in range(0, self.head_dim, 2 * lanes if self.kernel.pairs else lanes):
                places = [b.add(start, I64(part + half)) for half in ((0, lanes) if self.kernel.pairs else (0,))]
                means = [b.fdiv(code.load(self.sums, place, self.vector, of=F32), whole) for place in places]
                if self.kernel.pairs:  # the values were multiplied as two tokens' pairs: see `_add_pairs`
                    orders = [[0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23]]
                    orders += [[place + 8 for place in orders[0]]]
                    means = [code.shuffle(means[0], means[1], order) for order in orders]
                for place, mean in zip(places, means, strict=True):
                    self._answer(mean if self.kernel.q_type == "float32" else code.narrow(mean), place)

    def _blocks(self) -> None:
        """All blocks of the context that the token sees, the next one's places found while one is read."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        position = b.sext(code.load(code.arg(2), self.token, I32), I64)
        context, begin = b.add(position, I64(1)), self.kernel.scores.begin(code, position)
        table = code.at(code.arg(4), b.mul(self._row(), code.dim(4, 1)), I32)
        numbers = 2 * self.kernel.num_kv_heads * self.head_dim
        block_places = BlockPlaces(code, table, code.dim(1, 1), numbers, context, begin)
        block_places.find(begin, I64(lanes), self.ahead)
        with code.loop(begin, context, lanes) as block:
            code.store(code.load(self.ahead, 0, ir.VectorType(I64, lanes), of=I64), self.places, 0, of=I64)
            block_places.find(b.add(block, I64(lanes)), I64(lanes), self.ahead)
            limit = code.splat(b.sitofp(b.sub(context, block), F32), lanes)
            seen = b.fcmp_ordered("<", self.vector([float(lane) for lane in range(lanes)]), limit)
            at_once = max(1, MOST_SUMS * lanes // self.head_dim)
            with code.loop(self.first, self.end) as kv_head:
                for some in range(0, self.group, at_once):
                    head = b.add(b.mul(kv_head, I64(self.group)), I64(some))
                    self._block(kv_head, head, min(at_once, self.group - some), seen, fetch=some == 0)

    def _block(self, kv_head: Any, first: Any, count: int, seen: Any, *, fetch: bool) -> None:
        """Add a block of tokens, those `seen`, for the `count` query heads from `first`, which share a KV head."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        heads = [b.add(first, I64(number)) for number in range(count)]
        keys = b.mul(kv_head, I64(self.head_dim))
        values = b.add(keys, I64(self.kernel.num_kv_heads * self.head_dim))
        starts = [b.mul(head, I64(self.head_dim)) for head in heads]
        places = [[b.add(start, I64(part)) for part in range(0, self.head_dim, lanes)] for start in starts]
        sums = [[code.variable(code.load(self.sums, place, self.vector, of=F32)) for place in row] for row in places]
        scale = self.vector([self.head_dim**-0.5] * lanes)
        products = self._scores(keys, places, fetch=fetch)
        scores = [self.kernel.scores.capped(code, b.fmul(product, scale)) for product in products]
        for number, (head, score) in enumerate(zip(heads, scores, strict=True)):
            seen_score = b.select(seen, score, self.vector([LOWEST] * lanes))
            highest = code.call(f"llvm.vector.reduce.fmax.v{lanes}f32", F32, seen_score)
            before = code.load(self.tops, head, F32)
            top = b.select(b.fcmp_ordered(">", highest, before), highest, before)
            fade = code.exp(code.splat(b.fsub(before, top), lanes))
            weight = code.exp(b.fsub(seen_score, code.splat(top, lanes)))
            code.store(top, self.tops, head)
            code.store(code.fma(code.load(self.totals, head, self.vector), fade, weight), self.totals, head)
            for total in sums[number]:
                total.set(b.fmul(total.get(), fade))
            if self.kernel.pairs:
                weight = code.narrow(weight)
            code.store(weight, self.weights, number)
        step = 2 if self.kernel.pairs else 1
        with code.loop(I64(0), I64(lanes), step) as lane:
            tokens = [b.add(code.load(self.places, b.add(lane, I64(place)), I64), values) for place in range(step)]
            if fetch:
                for place in range(step):
                    self._fetch(b.add(lane, I64(place)), values)
            if self.kernel.pairs:
                self._add_pairs(lane, tokens, sums)
            else:
                self._add(lane, tokens[0], sums)
        for row, totals in zip(places, sums, strict=True):
            for place, total in zip(row, totals, strict=True):
                code.store(total.get(), self.sums, place, of=F32)

    def _add(self, lane: Any, token: Any, sums: list[list[Variable]]) -> None:
        """Add a token's values, times its weight for every head."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        parts = [
            code.wide(self.pages, b.add(token, I64(part)), lanes, self.number)
            for part in range(0, self.head_dim, lanes)
        ]
        for number, row in enumerate(sums):
            weight = code.splat(code.load(self.weights, b.add(lane, I64(number * lanes)), F32), lanes)
            for total, part in zip(row, parts, strict=True):
                total.set(code.fma(weight, part, total.get()))

    def _add_pairs(self, lane: Any, tokens: list[Any], sums: list[list[Variable]]) -> None:
        """Add two tokens' values, times their weights for every head: of every 8 numbers, 4 to one sum and 4 to the next."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        halves = [
            [4 * half + first + place // 2 + place % 2 * 32 for first in range(0, 32, 8) for place in range(8)]
            for half in (0, 1)
        ]
        parts = list[Any]()
        for part in range(0, self.head_dim, PAIRS.count):
            both = [code.load(self.pages, b.add(token, I64(part)), PAIRS, of=BF16) for token in tokens]
            parts += [code.shuffle(both[0], both[1], half) for half in halves]
        for number, row in enumerate(sums):
            pair = code.load(self.weights, b.add(b.sdiv(lane, I64(2)), I64(number * lanes // 2)), I32)
            weights = b.bitcast(code.splat(pair, lanes), PAIRS)
            for total, part in zip(row, parts, strict=True):
                total.set(self._dot(total.get(), part, weights))

    def _scores(self, keys: Any, queries: list[list[Any]], *, fetch: bool) -> list[Any]:
        """For every query head, the unscaled scores of a block's tokens."""
        code, b, wholes = self.code, self.code.builder, [list[Any]() for _ in queries]
        step = PAIRS.count if self.kernel.pairs else self.lanes

        def read(base: Any, place: Any, number: ir.Type) -> Any:
            return code.load(base, place, PAIRS, of=BF16) if self.kernel.pairs else code.wide(base, place, step, number)

        number = NUMBERS[self.kernel.q_type]
        query_parts = [
            [read(code.arg(0), b.add(self.query, place), number) for place in row[:: step // self.lanes]]
            for row in queries
        ]
        for first in range(0, self.lanes, 4):
            products = [list[Any]() for _ in query_parts]
            for lane in range(first, first + 4):
                if fetch:
                    self._fetch(I64(lane), keys)
                token = b.add(code.load(self.places, lane, I64), keys)
                for part in range(0, self.head_dim, step):
                    key = read(self.pages, b.add(token, I64(part)), self.number)
                    for row, query in zip(products, query_parts, strict=True):
                        if part == 0:
                            row.append(self._dot(self.vector([0.0] * self.lanes), query[0], key))
                        else:
                            row[-1] = self._dot(row[-1], query[part // step], key)
            for row, whole in zip(products, wholes, strict=True):
                whole.append(code.parts_of_four(row))
        return [code.sums_of_parts(whole) for whole in wholes]

    def _dot(self, total: Any, x: Any, y: Any) -> Any:
        """The sums with the products of two vectors' numbers, or of their pairs, added."""
        if not self.kernel.pairs:
            return self.code.fma(x, y, total)
        return self.code.call("llvm.x86.avx512bf16.dpbf16ps.512", self.vector, total, x, y)

    def _fetch(self, lane: Any, head: Any) -> None:
        """Fetch the lines of memory of a head's numbers, `head` numbers into a token of the next block."""
        code, b = self.code, self.code.builder
        per_line = _LINE // (2 if self.number == BF16 else 4)
        token = b.add(code.load(self.ahead, lane, I64), head)
        for number in range(0, self.head_dim, per_line):
            place = code.at(self.pages, b.add(token, I64(number)), ir.IntType(8 * _LINE // per_line))
            code.prefetch(b.bitcast(place, POINTER))

    def _row(self) -> Any:
        """The row of the batch that the token belongs to."""
        code, b, row = self.code, self.code.builder, self.code.variable(I64(0))
        with code.loop_while(
            lambda: b.icmp_signed("<=", b.sext(code.load(code.arg(3), b.add(row.get(), I64(1)), I32), I64), self.token)
        ):
            row.set(b.add(row.get(), I64(1)))
        return row.get()

    def _heads(self) -> AbstractContextManager[Any]:
        """A loop over the item's query heads."""
        b, group = self.code.builder, I64(self.group)
        return self.code.loop(b.mul(self.first, group), b.mul(self.end, group))

    def _numbers(self) -> AbstractContextManager[Any]:
        """A loop over the vectors of the item's query heads: where they begin in the token's numbers."""
        b, numbers = self.code.builder, I64(self.group * self.head_dim)
        return self.code.loop(b.mul(self.first, numbers), b.mul(self.end, numbers), self.lanes)

    def _answer(self, vector: Any, place: Any) -> None:
        """Store a part of the token's result."""
        self.code.store(
            vector, self.code.ret(0), self.code.builder.add(self.query, place), of=NUMBERS[self.kernel.q_type]
        )
