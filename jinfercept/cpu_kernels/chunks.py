"""Paged attention of chunks on a CPU: an item is a tile of one row's queries, of the query heads that share a KV head.

A tile is two vectors of queries, one in every lane, so that softmax needs no sums within a vector. It goes over the context in
blocks (online softmax in float32): scores are products of the block's keys with the queries, which lie transposed in a buffer,
and sums are products of the values with the weights. CPUs with bfloat16 dot products multiply pairs of numbers, and round the
weights to bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, Code
from jinfercept.cpu_kernels.decode import LOWEST, NUMBERS, BlockPlaces, Scores, sinks_of
from jinfercept.cpu_kernels.tiles import PAIRS, add_products, has_pairs, zeros
from jinfercept.layouts.pages import Batch, KVPages
from jinfercept.layouts.scoring import PLAIN, Scoring

BLOCK = 64
"""Most context tokens of a block."""


def chunk_attention(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, decoded: Float[Array, "T H D"], scoring: Scoring = PLAIN
) -> Float[Array, "T H D"]:
    """`decoded`, with the attention of the chunks' tokens in their places; of what `supports`."""
    kernel = _Chunks(
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        num_kv_heads=pages.shape[3],
        dtype=q.dtype.name,
        lanes=native.lanes(),
        scores=Scores.of(scoring),
    )
    operands = q, pages, batch.positions, batch.query_starts, batch.page_tables, batch.num_decode, decoded
    return native.call(kernel, jax.ShapeDtypeStruct(q.shape, q.dtype), *operands, *sinks_of(scoring), into=6)


def supports(q: jax.Array, pages: jax.Array) -> bool:
    """Whether `chunk_attention` computes this."""
    dtypes = jnp.float32, jnp.bfloat16 if has_pairs() else jnp.float32
    return q.dtype == pages.dtype and q.dtype in dtypes and q.shape[2] % (2 * native.lanes()) == 0


@dataclass(frozen=True)
class _Chunks:
    """Operands: queries, pages, positions, query starts, page tables, number of decode rows, the result, sinks if any."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    dtype: str
    lanes: int
    scores: Scores

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}_{self.num_kv_heads}_{self.head_dim}"
        return f"chunks_{heads}_{self.dtype}_{self.lanes}{self.scores.name}"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Queries of a tile."""
        return 2 * self.lanes

    def num_items(self, code: Code) -> Any:
        b, tiles = code.builder, code.variable(I64(0))
        with code.loop(self.first_row(code), b.sub(code.dim(3, 0), I64(1))) as row:
            tiles.set(b.add(tiles.get(), self.num_tiles(code, row)))
        return b.mul(tiles.get(), I64(self.num_kv_heads))

    def item(self, code: Code, index: Any) -> None:
        b = code.builder
        row, tile = code.variable(self.first_row(code)), code.variable(b.sdiv(index, I64(self.num_kv_heads)))
        with code.loop_while(lambda: b.icmp_signed(">=", tile.get(), self.num_tiles(code, row.get()))):
            tile.set(b.sub(tile.get(), self.num_tiles(code, row.get())))
            row.set(b.add(row.get(), I64(1)))
        _Tile(self, code, row.get(), b.mul(tile.get(), I64(self.width)), b.srem(index, I64(self.num_kv_heads))).attend()

    def first_row(self, code: Code) -> Any:
        """The first row that is a chunk."""
        return code.builder.sext(code.load(code.arg(5), 0, I32), I64)

    def start(self, code: Code, row: Any) -> Any:
        """A row's first token."""
        return code.builder.sext(code.load(code.arg(3), row, I32), I64)

    def num_queries(self, code: Code, row: Any) -> Any:
        """Queries of a row that share a KV head: those of its first token come first."""
        b = code.builder
        length = b.sub(self.start(code, b.add(row, I64(1))), self.start(code, row))
        return b.mul(length, I64(self.group))

    def num_tiles(self, code: Code, row: Any) -> Any:
        """Tiles of a row with one KV head."""
        b = code.builder
        return b.sdiv(b.add(self.num_queries(code, row), I64(self.width - 1)), I64(self.width))


class _Tile:
    """Emits attention of the queries from `first` on, of a row and a KV head."""

    def __init__(self, kernel: _Chunks, code: Code, row: Any, first: Any, kv_head: Any) -> None:
        b, width, depth = code.builder, kernel.width, kernel.head_dim
        self.kernel, self.code, self.row, self.first, self.kv_head = kernel, code, row, first, kv_head
        self.lanes, self.width, self.depth = kernel.lanes, width, depth
        self.vector, self.number = ir.VectorType(F32, self.lanes), NUMBERS[kernel.dtype]
        self.step = 1 if self.number == F32 else 2  # numbers of a product's word, and tokens of a weight's
        self.words = PAIRS if self.number == BF16 else self.vector
        self.at_once = self.lanes // 2  # rows of a product, two sums each: they stay in registers
        with b.goto_entry_block():
            self.queries, self.sums, self.scores, self.values, self.places, self.positions, self.tops, self.totals = (
                self._buffer(number, size)
                for number, size in (
                    (I32, depth // self.step * width),  # [words of a head, width]
                    (F32, depth * width),
                    (F32, BLOCK * width),  # then weights
                    (I32, BLOCK // self.step * depth),  # [words of tokens, numbers of a head]
                    (I64, BLOCK),
                    *[(F32, width)] * 3,
                )
            )

    def attend(self) -> None:
        """The mean of the values, weighted by the softmax of the scores."""
        code, b = self.code, self.code.builder
        self._transpose_queries()
        with code.loop(I64(0), I64(self.depth * self.width), self.lanes) as place:
            code.store(self.vector([0.0] * self.lanes), self.sums, place, of=F32)
        has_sinks = self.kernel.scores.has_sinks
        for half in (0, self.lanes):
            if not has_sinks:
                code.store(self.vector([LOWEST] * self.lanes), self.tops, half, of=F32)
            code.store(self.vector([1.0 if has_sinks else 0.0] * self.lanes), self.totals, half, of=F32)
        first, last = (b.fptosi(code.load(self.positions, lane, F32), I64) for lane in (0, self.width - 1))
        tokens, begin = b.add(last, I64(1)), self.kernel.scores.begin(code, first)
        table = code.at(code.arg(4), b.mul(self.row, code.dim(4, 1)), I32)
        numbers = 2 * self.kernel.num_kv_heads * self.depth
        context = BlockPlaces(code, table, code.dim(1, 1), numbers, tokens, begin)
        with code.loop(begin, tokens, BLOCK) as block:
            num_tokens = b.sub(tokens, block)
            whole = b.mul(b.sdiv(b.add(num_tokens, I64(self.at_once - 1)), I64(self.at_once)), I64(self.at_once))
            count = b.select(b.icmp_signed("<", whole, I64(BLOCK)), whole, I64(BLOCK))
            context.find(block, count, self.places)
            self._add_block(block, count)
        self._answer()

    def _add_block(self, block: Any, count: Any) -> None:
        code, b, lanes = self.code, self.code.builder, self.lanes
        halves = range(0, self.width, lanes)
        self._score(block, count)
        before = [code.load(self.tops, half, self.vector, of=F32) for half in halves]
        tops = [code.variable(top) for top in before]
        with code.loop(I64(0), count) as token:
            for half, top in zip(halves, tops, strict=True):
                score = code.load(self.scores, self._at(token, half), self.vector, of=F32)
                top.set(b.select(b.fcmp_ordered(">", score, top.get()), score, top.get()))
        fades = [code.exp(b.fsub(old, top.get())) for old, top in zip(before, tops, strict=True)]
        totals = [
            code.variable(b.fmul(code.load(self.totals, half, self.vector, of=F32), fade))
            for half, fade in zip(halves, fades, strict=True)
        ]
        with code.loop(I64(0), count, self.step) as token:
            for half, top, total in zip(halves, tops, totals, strict=True):
                weights = list[Any]()
                for more in range(self.step):
                    score = code.load(self.scores, self._at(b.add(token, I64(more)), half), self.vector, of=F32)
                    weights.append(code.exp(b.fsub(score, top.get())))
                    total.set(b.fadd(total.get(), weights[-1]))
                word = b.sdiv(token, I64(self.step))  # over scores that are read already
                code.store(self._word(weights), self.scores, self._at(word, half), of=I32)
        for half, top, total in zip(halves, tops, totals, strict=True):
            code.store(top.get(), self.tops, half, of=F32)
            code.store(total.get(), self.totals, half, of=F32)
        self._copy_values(count)
        with code.loop(I64(0), I64(self.depth), self.at_once) as first:
            rows = [b.add(first, I64(row)) for row in range(self.at_once)]
            sums = zeros(code, 2 * len(rows), lanes)
            places = [self._at(row, half) for row in rows for half in halves]
            for index, (total, place) in enumerate(zip(sums, places, strict=True)):
                total.set(b.fmul(code.load(self.sums, place, self.vector, of=F32), fades[index % 2]))
            with code.loop(I64(0), b.sdiv(count, I64(self.step))) as word:
                weights = [code.load(self.scores, self._at(word, half), self.words, of=I32) for half in halves]
                start = b.mul(word, I64(self.depth))
                self._multiply(sums, [(self.values, b.add(start, row)) for row in rows], weights)
            for total, place in zip(sums, places, strict=True):
                code.store(total.get(), self.sums, place, of=F32)

    def _score(self, block: Any, count: Any) -> None:
        """Scores of a block's tokens, scaled; the lowest number where a query does not see a token."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        halves, scale = range(0, self.width, lanes), self.vector([self.depth**-0.5] * lanes)
        key = b.mul(self.kv_head, I64(self.depth))
        with code.loop(I64(0), count, self.at_once) as first:
            tokens = [b.add(first, I64(token)) for token in range(self.at_once)]
            keys = [
                code.at(code.arg(1), b.add(code.load(self.places, token, I64), key), self.number) for token in tokens
            ]
            sums = zeros(code, 2 * len(tokens), lanes)
            with code.loop(I64(0), I64(self.depth // self.step)) as word:
                queries = [code.load(self.queries, self._at(word, half), self.words, of=I32) for half in halves]
                self._multiply(sums, [(start, word) for start in keys], queries)
            for index, total in enumerate(sums):
                token, half = tokens[index // 2], halves[index % 2]
                place = code.splat(b.sitofp(b.add(block, token), F32), lanes)
                position = code.load(self.positions, half, self.vector, of=F32)
                seen = b.fcmp_ordered("<=", place, position)
                if (window := self.kernel.scores.window) is not None:
                    before = b.fsub(position, self.vector([float(window)] * lanes))
                    seen = b.and_(seen, b.fcmp_ordered(">", place, before))
                score = self.kernel.scores.capped(code, b.fmul(total.get(), scale))
                score = b.select(seen, score, self.vector([LOWEST] * lanes))
                code.store(score, self.scores, self._at(token, half), of=F32)

    def _multiply(self, sums: list[Any], words: list[tuple[Any, Any]], halves: list[Any]) -> None:
        """Add the products of words, for all lanes the same, with both halves of a tile."""
        for index, (base, place) in enumerate(words):
            word = self.code.load(base, place, I32 if self.step == 2 else F32)
            word = self.code.splat(word, self.lanes)
            for half, numbers in enumerate(halves):
                add_products(self.code, sums[2 * index + half], word, numbers)

    def _transpose_queries(self) -> None:
        """Give the buffers every lane's query, position and sink; lanes beyond the row's queries repeat the last one."""
        code, b = self.code, self.code.builder
        with code.loop(I64(0), I64(self.width)) as lane:
            token, head, _ = self._query(lane)
            position = b.sitofp(code.load(code.arg(2), token, I32), F32)
            code.store(position, self.positions, lane)
            if self.kernel.scores.has_sinks:
                code.store(code.load(code.arg(7), head, F32), self.tops, lane)
            start = code.at(code.arg(0), self._numbers(token, head), self.number)
            with code.loop(I64(0), I64(self.depth // self.step)) as word:
                place = b.add(b.mul(word, I64(self.width)), lane)
                code.store(code.load(start, word, I32), self.queries, place)

    def _copy_values(self, count: Any) -> None:
        """Give the buffer a block's values, in words as `_word`."""
        code, b = self.code, self.code.builder
        value = b.mul(b.add(self.kv_head, I64(self.kernel.num_kv_heads)), I64(self.depth))
        vector = ir.VectorType(self.number, self.lanes)
        with code.loop(I64(0), count, self.step) as token:
            starts = [b.add(code.load(self.places, b.add(token, I64(more)), I64), value) for more in range(self.step)]
            for part in range(0, self.depth, self.lanes):
                numbers = [code.load(code.arg(1), b.add(start, I64(part)), vector, of=self.number) for start in starts]
                place = b.add(b.mul(b.sdiv(token, I64(self.step)), I64(self.depth)), I64(part))
                code.store(self._word(numbers), self.values, place, of=I32)

    def _word(self, vectors: list[Any]) -> Any:
        """A vector of float32, or two as pairs of bfloat16."""
        if len(vectors) == 1:
            return vectors[0]
        narrow = ir.VectorType(BF16, self.lanes)
        both = [v if v.type == narrow else self.code.narrow(v) for v in vectors]
        order = [place for lane in range(self.lanes) for place in (lane, lane + self.lanes)]
        return self.code.shuffle(both[0], both[1], order)

    def _answer(self) -> None:
        """Store the means in the result."""
        code, b, lanes = self.code, self.code.builder, self.lanes
        totals = [code.load(self.totals, half, self.vector, of=F32) for half in (0, lanes)]
        with code.loop(I64(0), I64(self.depth)) as number:
            for half, total in zip((0, lanes), totals, strict=True):
                place = self._at(number, half)
                code.store(b.fdiv(code.load(self.sums, place, self.vector, of=F32), total), self.sums, place, of=F32)
        with code.loop(I64(0), I64(self.width)) as lane:
            token, head, is_there = self._query(lane)
            with b.if_then(is_there):
                with code.loop(I64(0), I64(self.depth)) as number:
                    mean = code.load(self.sums, b.add(b.mul(number, I64(self.width)), lane), F32)
                    code.store(mean, self.values, number, of=F32)
                for part in range(0, self.depth, lanes):
                    mean = code.load(self.values, part, self.vector, of=F32)
                    if self.number == BF16:
                        mean = code.narrow(mean)
                    code.store(mean, code.ret(0), b.add(self._numbers(token, head), I64(part)), of=self.number)

    def _query(self, lane: Any) -> tuple[Any, Any, Any]:
        """A lane's token and query head, and whether it has a query of its own."""
        code, b, kernel = self.code, self.code.builder, self.kernel
        query, last = b.add(self.first, lane), b.sub(kernel.num_queries(code, self.row), I64(1))
        is_there = b.icmp_signed("<=", query, last)
        query, group = b.select(is_there, query, last), I64(kernel.group)
        token = b.add(kernel.start(code, self.row), b.sdiv(query, group))
        return token, b.add(b.mul(self.kv_head, group), b.srem(query, group)), is_there

    def _numbers(self, token: Any, head: Any) -> Any:
        """Where the numbers of a token's head begin, in queries and result."""
        b = self.code.builder
        return b.mul(b.add(b.mul(token, I64(self.kernel.num_heads)), head), I64(self.depth))

    def _at(self, row: Any, half: int) -> Any:
        """Place of a row of a buffer that is as wide as the tile, in one of its halves."""
        b = self.code.builder
        return b.add(b.mul(row, I64(self.width)), I64(half))

    def _buffer(self, number: ir.Type, size: int) -> Any:
        place = self.code.builder.alloca(ir.ArrayType(number, size))
        place.align = 64
        return place
