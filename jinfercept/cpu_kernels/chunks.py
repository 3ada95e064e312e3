"""Paged attention of chunks on a CPU: an item is a tile of one row's queries, of the query heads that share a KV head.

A tile is two vectors of queries, one in every lane, so that softmax needs no sums within a vector. It goes over the context in
blocks (online softmax in float32). Scores are products of the block's keys with the queries, which lie transposed in a buffer;
sums are products of the values with the weights. CPUs with bfloat16 dot products multiply pairs of numbers, and round the
weights to bfloat16.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from llvmlite import ir

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.code import BF16, F32, I32, I64, TYPES, Buffer, Code, Value, Variable, add_products
from jinfercept.cpu_kernels.decode import LOWEST, BlockPlaces, Scores, sinks_of
from jinfercept.cpu_kernels.tiles import has_pairs
from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

BLOCK = 64
"""Most context tokens of a block."""


def chunk_attention(q: HeadRows, pages: KVPages, batch: Batch, decoded: HeadRows, scoring: Scoring = PLAIN) -> HeadRows:
    """`decoded`, with the attention of the chunks' tokens in their places, for arguments that `supports` accepts."""
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
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        return 2 * self.lanes

    def num_items(self, code: Code) -> Value:
        tiles = code.variable(0)
        with code.loop(self.first_row(code), code.dim(3, 0) - 1) as row:
            tiles.value = tiles.value + self.num_tiles(code, row)
        return tiles.value * self.num_kv_heads

    def item(self, code: Code, index: Value) -> None:
        row, tile = code.variable(self.first_row(code)), code.variable(index // self.num_kv_heads)
        with code.loop_while(lambda: tile.value >= self.num_tiles(code, row.value)):
            tile.value = tile.value - self.num_tiles(code, row.value)
            row.value = row.value + 1
        _Tile(self, code, row.value, tile.value * self.width, index % self.num_kv_heads).attend()

    def first_row(self, code: Code) -> Value:
        return code.arg(5, I32)[0].to(I64)

    def start(self, code: Code, row: Value) -> Value:
        return code.arg(3, I32)[row].to(I64)

    def num_queries(self, code: Code, row: Value) -> Value:
        # of a row, for one KV head: those of the row's first token come first
        return (self.start(code, row + 1) - self.start(code, row)) * self.group

    def num_tiles(self, code: Code, row: Value) -> Value:
        return self.num_queries(code, row).tiles(self.width)


class _Tile:
    def __init__(self, kernel: _Chunks, code: Code, row: Value, first: Value, kv_head: Value) -> None:
        width, depth = kernel.width, kernel.head_dim
        self.kernel, self.code, self.row, self.first, self.kv_head = kernel, code, row, first, kv_head
        self.lanes, self.width, self.depth = kernel.lanes, width, depth
        self.kind, self.halves = TYPES[kernel.dtype], range(0, width, kernel.lanes)
        self.step = 1 if self.kind == F32 else 2  # numbers of a product's word, and tokens of a weight's
        self.at_once = self.lanes // 2  # rows of a product, two sums each: they stay in registers

        def buffer(kind: ir.Type, size: int) -> Buffer:
            return code.buffer(kind, size, align=64)

        self.queries = buffer(I32, depth // self.step * width)  # [words of a head, width]
        self.sums = buffer(F32, depth * width)
        self.scores = buffer(F32, BLOCK * width)  # then weights
        self.values = buffer(I32, BLOCK // self.step * depth)  # [words of tokens, numbers of a head]
        self.places = buffer(I64, BLOCK)
        self.positions, self.tops, self.totals = (buffer(F32, width) for _ in range(3))

    def attend(self) -> None:
        code, lanes = self.code, self.lanes
        self._transpose_queries()
        with code.loop(0, self.depth * self.width, lanes) as place:
            self.sums[place] = code.full(lanes, 0.0)
        has_sinks = self.kernel.scores.has_sinks
        for half in self.halves:
            if not has_sinks:
                self.tops[half] = code.full(lanes, LOWEST)
            self.totals[half] = code.full(lanes, 1.0 if has_sinks else 0.0)
        first, last = (self.positions[lane].to(I64) for lane in (0, self.width - 1))
        tokens, begin = last + 1, self.kernel.scores.begin(code, first)
        table = code.arg(4, I32) + self.row * code.dim(4, 1)
        numbers = 2 * self.kernel.num_kv_heads * self.depth
        context = BlockPlaces(code, table, code.dim(1, 1), numbers, tokens, begin)
        with code.loop(begin, tokens, BLOCK) as block:
            whole = (tokens - block).tiles(self.at_once) * self.at_once
            count = code.least(whole, BLOCK)
            context.find(block, count, self.places)
            self._add_block(block, count)
        self._answer()

    def _add_block(self, block: Value, count: Value) -> None:
        code, lanes = self.code, self.lanes
        self._score(block, count)
        before = [self.tops.vector(half, lanes) for half in self.halves]
        tops = [code.variable(top) for top in before]
        with code.loop(0, count) as token:
            for half, top in zip(self.halves, tops, strict=True):
                score = self.scores.vector(token * self.width + half, lanes)
                top.value = code.where(score > top.value, score, top.value)
        fades = [code.exp(old - top.value) for old, top in zip(before, tops, strict=True)]
        totals = [
            code.variable(self.totals.vector(half, lanes) * fade) for half, fade in zip(self.halves, fades, strict=True)
        ]
        with code.loop(0, count, self.step) as token:
            for half, top, total in zip(self.halves, tops, totals, strict=True):
                weights = list[Value]()
                for more in range(self.step):
                    score = self.scores.vector((token + more) * self.width + half, lanes)
                    weights.append(code.exp(score - top.value))
                    total.value = total.value + weights[-1]
                word = token // self.step  # over scores that are read already
                self.scores[word * self.width + half] = self._word(weights)
        for half, top, total in zip(self.halves, tops, totals, strict=True):
            self.tops[half] = top.value
            self.totals[half] = total.value
        self._copy_values(count)
        with code.loop(0, self.depth, self.at_once) as first:
            rows = [first + row for row in range(self.at_once)]
            sums = code.sums(2 * len(rows), lanes)
            places = [row * self.width + half for row in rows for half in self.halves]
            for index, (total, place) in enumerate(zip(sums, places, strict=True)):
                total.value = self.sums.vector(place, lanes) * fades[index % 2]
            with code.loop(0, count // self.step) as word:
                weights = self._words(self.scores, word)
                start = word * self.depth
                self._multiply(sums, [(self.values, start + row) for row in rows], weights)
            for total, place in zip(sums, places, strict=True):
                self.sums[place] = total.value

    def _score(self, block: Value, count: Value) -> None:
        code, lanes, scores = self.code, self.lanes, self.kernel.scores
        key = self.kv_head * self.depth
        with code.loop(0, count, self.at_once) as first:
            tokens = [first + token for token in range(self.at_once)]
            keys = [code.arg(1, self.kind) + (self.places[token] + key) for token in tokens]
            sums = code.sums(2 * len(tokens), lanes)
            with code.loop(0, self.depth // self.step) as word:
                queries = self._words(self.queries, word)
                self._multiply(sums, [(start.of(I32), word) for start in keys], queries)
            for index, total in enumerate(sums):
                token, half = tokens[index // 2], self.halves[index % 2]
                place = (block + token).to(F32).broadcast(lanes)
                position = self.positions.vector(half, lanes)
                seen = place <= position
                if scores.window is not None:
                    seen = seen & (place > position - float(scores.window))
                score = scores.capped(code, total.value * self.depth**-0.5)
                self.scores[token * self.width + half] = code.where(seen, score, LOWEST)

    def _words(self, buffer: Buffer, row: Value) -> list[Value]:
        words = [buffer.of(I32).vector(row * self.width + half, self.lanes) for half in self.halves]
        return [word.bits(self.kind) for word in words]

    def _multiply(self, sums: list[Variable], words: list[tuple[Buffer, Value]], halves: list[Value]) -> None:
        for index, (base, place) in enumerate(words):
            word = base[place].broadcast(self.lanes).bits(self.kind)
            add_products(sums[2 * index : 2 * index + 2], word, halves)

    def _transpose_queries(self) -> None:
        code = self.code
        with code.loop(0, self.width) as lane:
            token, head, _ = self._query(lane)
            self.positions[lane] = code.arg(2, I32)[token].to(F32)
            if self.kernel.scores.has_sinks:
                self.tops[lane] = code.arg(7, F32)[head]
            start = (code.arg(0, self.kind) + self._start(token, head)).of(I32)
            with code.loop(0, self.depth // self.step) as word:
                self.queries[word * self.width + lane] = start[word]

    def _copy_values(self, count: Value) -> None:
        code = self.code
        value = (self.kv_head + self.kernel.num_kv_heads) * self.depth
        with code.loop(0, count, self.step) as token:
            starts = [self.places[token + more] + value for more in range(self.step)]
            for part in range(0, self.depth, self.lanes):
                numbers = [code.arg(1, self.kind).vector(start + part, self.lanes) for start in starts]
                self.values[token // self.step * self.depth + part] = self._word(numbers)

    def _word(self, vectors: list[Value]) -> Value:
        # a vector of float32, or two as pairs of bfloat16
        if len(vectors) == 1:
            return vectors[0]
        return self.code.interleaved(*(vector.to(BF16) for vector in vectors))

    def _answer(self) -> None:
        code, lanes = self.code, self.lanes
        totals = [self.totals.vector(half, lanes) for half in self.halves]
        with code.loop(0, self.depth) as number:
            for half, total in zip(self.halves, totals, strict=True):
                place = number * self.width + half
                self.sums[place] = self.sums.vector(place, lanes) / total
        with code.loop(0, self.width) as lane:
            token, head, is_there = self._query(lane)
            with code.when(is_there):
                means = self.values.of(F32)
                with code.loop(0, self.depth) as number:
                    means[number] = self.sums[number * self.width + lane]
                for part in range(0, self.depth, lanes):
                    code.ret(0, self.kind).put(self._start(token, head) + part, [means.vector(part, lanes)])

    def _query(self, lane: Value) -> tuple[Value, Value, Value]:
        code, kernel = self.code, self.kernel
        query, last = self.first + lane, kernel.num_queries(code, self.row) - 1
        is_there = query <= last
        # lanes beyond the row's queries repeat the last one
        query = code.where(is_there, query, last)
        token = kernel.start(code, self.row) + query // kernel.group
        return token, self.kv_head * kernel.group + query % kernel.group, is_there

    def _start(self, token: Value, head: Value) -> Value:
        return (token * self.kernel.num_heads + head) * self.depth
