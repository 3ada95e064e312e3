"""Paged attention of single queries on a CPU: an item is a query token with all its heads, or one KV head's if tokens are few.

An item reads its row's context once, in blocks of as many tokens as a vector has numbers: scores by dot products, online
softmax in float32; the next block's lines of memory are fetched meanwhile. Places beyond the context repeat its last token
with a weight of 0, so that nothing unwritten is read.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, TYPES, Buffer, Code, Operand, Value, Variable, add_products
from jinfercept.cpu_kernels.tiles import PAIRS, has_pairs
from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, Scalar
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

DTYPES = ("float32", "bfloat16")
MOST_SUMS = 16  # vectors of weighted values that stay in registers
LOWEST = -1e30
_LINE = 64  # bytes


def decode_attention(
    q: HeadRows, pages: KVPages, batch: Batch, num_tokens: Scalar, scoring: Scoring = PLAIN
) -> HeadRows:
    """As `paged_attention_reference` for the first `num_tokens` tokens, zeros for others; for arguments that `supports`
    accepts."""
    kernel = _Decode(
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        num_kv_heads=pages.shape[3],
        q_type=q.dtype.name,
        pages_type=pages.dtype.name,
        lanes=native.lanes(),
        pairs=has_pairs() and q.dtype == pages.dtype == jnp.bfloat16 and q.shape[2] % PAIRS == 0,
        scores=Scores.of(scoring),
    )
    operands = q, pages, batch.positions, batch.query_starts, batch.page_tables, num_tokens, *sinks_of(scoring)
    return native.call(kernel, jax.ShapeDtypeStruct(q.shape, q.dtype), *operands)


def supports(q: jax.Array, pages: jax.Array) -> bool:
    """Whether `decode_attention` computes this."""
    return q.shape[2] % native.lanes() == 0 and {q.dtype.name, pages.dtype.name} <= {*DTYPES}


@dataclass(frozen=True)
class Scores:
    """The part of a layer's `Scoring` that is in a kernel's code."""

    window: int | None
    soft_cap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, scoring: Scoring) -> "Scores":
        return cls(scoring.window, scoring.soft_cap, scoring.sinks is not None)

    def begin(self, code: Code, first: Value) -> Value:
        """The first position that a query at position `first`, i64, sees."""
        if self.window is None:
            return code.number(0)
        begin = first - (self.window - 1)
        return code.where(begin > 0, begin, 0)

    def capped(self, code: Code, scores: Value) -> Value:
        return scores if self.soft_cap is None else code.capped(scores, self.soft_cap)


def sinks_of(scoring: Scoring) -> list[Float[Array, "H"]]:
    """A kernel's last operand, if the layer has sinks."""
    return [] if scoring.sinks is None else [scoring.sinks.astype(jnp.float32)]


@dataclass(frozen=True)
class _Decode:
    """Operands: queries, pages, positions, query starts, page tables, number of tokens, sinks if there are any.

    With `pairs`, pairs of bfloat16 are multiplied: of a head's numbers with keys, and of two tokens with values.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    q_type: str
    pages_type: str
    lanes: int
    pairs: bool
    scores: Scores

    def num_items(self, code: Code) -> Value:
        return code.dim(0, 0) * self._parts(code)

    def item(self, code: Code, index: Value) -> None:
        parts = self._parts(code)
        token, num_kv_heads = index // parts, code.number(self.num_kv_heads) // parts
        first = index % parts * num_kv_heads
        item = _Item(self, code, token, first, first + num_kv_heads)
        with code.builder.if_else((token < self._num_tokens(code)).llvm) as (used, padding):
            with used:
                item.attend()
            with padding:
                item.clear()

    def _num_tokens(self, code: Code) -> Value:
        return code.arg(5, I32)[0].to(I64)

    def _parts(self, code: Code) -> Value:
        # items of a token
        few = self._num_tokens(code) < 2 * native.num_threads()
        return code.where(few, code.number(self.num_kv_heads), 1)


class BlockPlaces:
    """Emits where the tokens of a row's context are, one block after the other.

    Args:
        table: the row's page table.
        numbers: of a token in a page.
        begin: the first block's first token.
    """

    def __init__(self, code: Code, table: Buffer, page_size: Value, numbers: int, tokens: Value, begin: Value) -> None:
        self.code, self.table, self.page_size, self.numbers, self.tokens = code, table, page_size, numbers, tokens
        # the next token's page in the table, and slot in the page
        self.page, self.slot = code.variable(begin // page_size), code.variable(begin % page_size)

    def find(self, block: Value, count: Operand, places: Buffer) -> None:
        """Write the first numbers of `count` tokens from `block` on; those beyond the context are its last one."""
        code, page, slot = self.code, self.page, self.slot
        with code.loop(0, count) as lane:
            first = self.table[page.value].to(I64) * self.page_size
            places[lane] = (first + slot.value) * self.numbers
            more = block + lane + 1 < self.tokens
            last = (slot.value + 1).equals(self.page_size)
            page.value = page.value + (more & last).unsigned(I64)
            following = code.where(last, 0, slot.value + 1)
            slot.value = code.where(more, following, slot.value)


class _Item:
    def __init__(self, kernel: _Decode, code: Code, token: Value, first: Value, end: Value) -> None:
        self.kernel, self.code, self.token, self.first, self.end = kernel, code, token, first, end
        self.lanes, self.head_dim = kernel.lanes, kernel.head_dim
        self.group = kernel.num_heads // kernel.num_kv_heads
        self.query_type, self.pages_type = TYPES[kernel.q_type], TYPES[kernel.pages_type]
        self.pages = code.arg(1, self.pages_type)
        self.query = token * (kernel.num_heads * self.head_dim)  # the first number of the token's queries
        self.sums = code.buffer(F32, kernel.num_heads * self.head_dim)
        self.totals = code.buffer(F32, kernel.num_heads * self.lanes)
        self.tops = code.buffer(F32, kernel.num_heads)
        self.weights = code.buffer(F32, self.group * self.lanes)
        self.places, self.ahead = (code.buffer(I64, self.lanes) for _ in range(2))

    def clear(self) -> None:
        with self._numbers() as place:
            self._answer(place, [self.code.full(self.lanes, 0.0)])

    def attend(self) -> None:
        code, lanes, pairs = self.code, self.lanes, self.kernel.pairs
        with self._numbers() as place:
            self.sums[place] = code.full(lanes, 0.0)
        has_sinks = self.kernel.scores.has_sinks
        with self._heads() as head:
            self.totals[head * lanes] = code.vector([1.0 if has_sinks else 0.0] + [0.0] * (lanes - 1))
            self.tops[head] = code.arg(6, F32)[head] if has_sinks else code.number(LOWEST, F32)
        self._blocks()
        with self._heads() as head:
            total = code.sums_of_four([self.totals.vector(head * lanes, lanes)] * 4)
            whole = total[0].broadcast(lanes)
            start = head * self.head_dim
            for part in range(0, self.head_dim, 2 * lanes if pairs else lanes):
                places = [start + (part + half) for half in ((0, lanes) if pairs else (0,))]
                means = [self.sums.vector(place, lanes) / whole for place in places]
                if pairs:  # the values were multiplied as two tokens' pairs: see `_add_pairs`
                    order = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23]
                    means = [code.shuffle(means[0], means[1], [place + more for place in order]) for more in (0, 8)]
                self._answer(places[0], means)

    def _blocks(self) -> None:
        code, lanes = self.code, self.lanes
        position = code.arg(2, I32)[self.token].to(I64)
        context, begin = position + 1, self.kernel.scores.begin(code, position)
        table = code.arg(4, I32) + self._row() * code.dim(4, 1)
        numbers = 2 * self.kernel.num_kv_heads * self.head_dim
        block_places = BlockPlaces(code, table, code.dim(1, 1), numbers, context, begin)
        block_places.find(begin, lanes, self.ahead)
        with code.loop(begin, context, lanes) as block:
            self.places[0] = self.ahead.vector(0, lanes)
            block_places.find(block + lanes, lanes, self.ahead)
            limit = (context - block).to(F32).broadcast(lanes)
            seen = code.vector([float(lane) for lane in range(lanes)]) < limit
            at_once = max(1, MOST_SUMS * lanes // self.head_dim)
            with code.loop(self.first, self.end) as kv_head:
                for some in range(0, self.group, at_once):
                    head = kv_head * self.group + some
                    self._block(kv_head, head, min(at_once, self.group - some), seen, fetch=some == 0)

    def _block(self, kv_head: Value, first: Value, count: int, seen: Value, *, fetch: bool) -> None:
        code, lanes = self.code, self.lanes
        heads = [first + number for number in range(count)]
        keys = kv_head * self.head_dim
        values = keys + self.kernel.num_kv_heads * self.head_dim
        places = [[head * self.head_dim + part for part in range(0, self.head_dim, lanes)] for head in heads]
        sums = [[code.variable(self.sums.vector(place, lanes)) for place in row] for row in places]
        products = self._scores(keys, places, fetch=fetch)
        scores = [self.kernel.scores.capped(code, product * self.head_dim**-0.5) for product in products]
        for number, (head, score) in enumerate(zip(heads, scores, strict=True)):
            seen_score = code.where(seen, score, LOWEST)
            highest = code.call(f"llvm.vector.reduce.fmax.v{lanes}f32", F32, seen_score)
            before = self.tops[head]
            top = code.where(highest > before, highest, before)
            fade = code.exp((before - top).broadcast(lanes))
            weight = code.exp(seen_score - top.broadcast(lanes))
            self.tops[head] = top
            total = self.totals.vector(head * lanes, lanes)
            self.totals[head * lanes] = weight.with_products(total, fade)
            for part in sums[number]:
                part.value = part.value * fade
            if self.kernel.pairs:
                self.weights.of(BF16)[number * lanes] = weight.to(BF16)
            else:
                self.weights[number * lanes] = weight
        step = 2 if self.kernel.pairs else 1
        with code.loop(0, lanes, step) as lane:
            tokens = [self.places[lane + place] + values for place in range(step)]
            if fetch:
                for place in range(step):
                    self._fetch(lane + place, values)
            if self.kernel.pairs:
                self._add_pairs(lane, tokens, sums)
            else:
                self._add(lane, tokens[0], sums)
        for row, totals in zip(places, sums, strict=True):
            for place, total in zip(row, totals, strict=True):
                self.sums[place] = total.value

    def _add(self, lane: Value, token: Value, sums: list[list[Variable]]) -> None:
        starts = range(0, self.head_dim, self.lanes)
        parts = [self.pages.vector(token + start, self.lanes).to(F32) for start in starts]
        for number, row in enumerate(sums):
            weight = self.weights[lane + number * self.lanes].broadcast(self.lanes)
            add_products(row, weight, parts)

    def _add_pairs(self, lane: Value, tokens: list[Value], sums: list[list[Variable]]) -> None:
        """Add two tokens' values, times their weights for every head: of every 8 numbers, 4 to one sum and 4 to the next."""
        code, lanes = self.code, self.lanes
        halves = [
            [4 * half + first + place // 2 + place % 2 * 32 for first in range(0, 32, 8) for place in range(8)]
            for half in (0, 1)
        ]
        parts = list[Value]()
        for part in range(0, self.head_dim, PAIRS):
            both = [self.pages.vector(token + part, PAIRS) for token in tokens]
            parts += [code.shuffle(both[0], both[1], half) for half in halves]
        for number, row in enumerate(sums):
            weights = self.weights.of(I32)[lane // 2 + number * lanes // 2].broadcast(lanes).bits(BF16)
            add_products(row, weights, parts)

    def _scores(self, keys: Value, queries: list[list[Value]], *, fetch: bool) -> list[Value]:
        code, wholes = self.code, [list[Value]() for _ in queries]
        step = PAIRS if self.kernel.pairs else self.lanes

        def read(base: Buffer, place: Value) -> Value:
            vector = base.vector(place, step)
            return vector if self.kernel.pairs else vector.to(F32)

        query = code.arg(0, self.query_type)
        query_parts = [[read(query, self.query + place) for place in row[:: step // self.lanes]] for row in queries]
        for first in range(0, self.lanes, 4):
            products = [list[Value]() for _ in query_parts]
            for lane in range(first, first + 4):
                if fetch:
                    self._fetch(lane, keys)
                token = self.places[lane] + keys
                totals = [code.full(self.lanes, 0.0) for _ in query_parts]
                for number, part in enumerate(range(0, self.head_dim, step)):
                    key = read(self.pages, token + part)
                    parts = zip(totals, query_parts, strict=True)
                    totals = [total.with_products(row[number], key) for total, row in parts]
                for row, total in zip(products, totals, strict=True):
                    row.append(total)
            for row, whole in zip(products, wholes, strict=True):
                whole.append(code.parts_of_four(row))
        return [code.sums_of_parts(whole) for whole in wholes]

    def _fetch(self, lane: Operand, head: Value) -> None:
        # the lines of the next block, `head` numbers into a token
        per_line = _LINE // (2 if self.pages_type == BF16 else 4)
        token = self.ahead[lane] + head
        for number in range(0, self.head_dim, per_line):
            (self.pages + (token + number)).prefetch()

    def _row(self) -> Value:
        code, row = self.code, self.code.variable(0)
        with code.loop_while(lambda: code.arg(3, I32)[row.value + 1].to(I64) <= self.token):
            row.value = row.value + 1
        return row.value

    def _heads(self) -> AbstractContextManager[Value]:
        return self.code.loop(self.first * self.group, self.end * self.group)

    def _numbers(self) -> AbstractContextManager[Value]:
        numbers = self.group * self.head_dim
        return self.code.loop(self.first * numbers, self.end * numbers, self.lanes)

    def _answer(self, place: Value, vectors: list[Value]) -> None:
        self.code.ret(0, self.query_type).put(self.query + place, vectors)
