"""The price of a step whose attention works in tiles, as on a CPU: rows of a tile wait for the longest of their contexts.

Every tile goes through its context in pieces, so that two rows in a tile of eight cost nearly what eight rows cost, and a
short chunk in a tile of 64 query tokens what 64 cost. `sched.profile.Profile` without tiles counts context tokens only.
"""

import math
import reprlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any, NamedTuple, Self

from jinfercept.errors import ConfigError
from jinfercept.sched.plan import StepPlan

Row = tuple[int, int]
"""First position and number of a row's query tokens."""


class AttentionTiles(NamedTuple):
    """Sizes of an implementation's tiles.

    Attributes:
        decode_rows: rows of one query token that a tile has.
        decode_tokens: context tokens by which such a tile goes on.
        narrow_queries, wide_queries: query tokens of a row's chunk that a tile has: wide ones first, the rest in narrow ones.
        chunk_tokens: context tokens by which such a tile goes on.
    """

    decode_rows: int
    decode_tokens: int
    narrow_queries: int
    wide_queries: int
    chunk_tokens: int


class TileWork(NamedTuple):
    """What attention of a step does.

    Attributes:
        tile_tokens: context tokens over all tiles.
        row_tokens: context tokens of decode rows, each with that of its tile's longest.
        pairs: query tokens times context tokens over all tiles of chunks.
    """

    tile_tokens: int
    row_tokens: int
    pairs: int


def tile_work(tiles: AttentionTiles, bucket: int, rows: Iterable[Row]) -> TileWork:
    """The work of a step.

    Args:
        bucket: query tokens of its executable, which no tile exceeds.
        rows: rows of one query token first.
    """
    rows = list(rows)
    decoding = [start + 1 for start, num_tokens in rows if num_tokens == 1]
    tile_tokens, row_tokens, pairs = 0, 0, 0
    for together in batched(decoding, min(tiles.decode_rows, bucket)):
        context_tokens = _whole(max(together), tiles.decode_tokens)
        tile_tokens += context_tokens
        row_tokens += len(together) * context_tokens
    for start, num_tokens in rows:
        for queries, end in _tiles_of(tiles, bucket, start, num_tokens) if num_tokens > 1 else ():
            context_tokens = _whole(end, tiles.chunk_tokens)
            tile_tokens += context_tokens
            pairs += queries * context_tokens
    return TileWork(tile_tokens, row_tokens, pairs)


@dataclass(frozen=True, slots=True)
class TiledPrice:
    """Seconds of a step: `bucket_s + per_tile_s · tile tokens + per_row_s · row tokens + per_pair_s · pairs`.

    Attributes:
        bucket_tokens: query tokens of the executables, ascending.
        bucket_s: seconds of each without attention.
        per_tile_s, per_row_s, per_pair_s: by the numbers of `TileWork`.
    """

    tiles: AttentionTiles
    bucket_tokens: tuple[int, ...]
    bucket_s: tuple[float, ...]
    per_tile_s: float
    per_row_s: float
    per_pair_s: float

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute, on the executable that it names."""
        return self.rows_s(plan.bucket, ((chunk.start, len(chunk.tokens)) for chunk in plan.chunks))

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Seconds of the steps that recompute a context and nothing else, see `Profile.recompute_s`."""
        starts = range(0, num_tokens, chunk_tokens)
        sizes = [(start, min(chunk_tokens, num_tokens - start)) for start in starts]
        return math.fsum(self.rows_s(size, ((start, size),)) for start, size in sizes)

    def rows_s(self, query_tokens: int, rows: Iterable[Row]) -> float:
        """Seconds of a step with so many query tokens and these rows, of one query token first.

        More query tokens than the largest bucket has take several steps.
        """
        largest = self.bucket_tokens[-1]
        at = bisect_left(self.bucket_tokens, min(query_tokens, largest))
        work = tile_work(self.tiles, self.bucket_tokens[at], rows)
        prices = self.per_tile_s, self.per_row_s, self.per_pair_s
        return max(1.0, query_tokens / largest) * self.bucket_s[at] + math.sumprod(prices, work)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """A price from the mapping that `dataclasses.asdict` makes. Raises `ConfigError` for another one."""
        try:
            price = cls(**values | {name: tuple(values[name]) for name in ("bucket_tokens", "bucket_s")})
            price = replace(price, tiles=AttentionTiles(*values["tiles"]))
            if price.is_sound:
                return price
        except (TypeError, KeyError):
            pass
        raise ConfigError(
            "a profile's tiled price is wrong", got=reprlib.repr(values), fix="measure again with `jinfercept profile`"
        )

    @property
    def is_sound(self) -> bool:
        """Whether a machine can have such a price. Raises `TypeError` for what is no number."""
        sizes, prices = (*self.tiles, *self.bucket_tokens), (self.per_tile_s, self.per_row_s, self.per_pair_s)
        return (
            0 < len(self.bucket_tokens) == len(self.bucket_s)
            and all(type(size) is int and size > 0 for size in sizes)
            and all(0 <= seconds < math.inf for seconds in (*self.bucket_s, *prices))
        )


def _tiles_of(tiles: AttentionTiles, bucket: int, start: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Query tokens of each tile of a chunk, empty places included, and the end of the context that the tile sees."""
    narrow, wide = min(tiles.narrow_queries, bucket), min(tiles.wide_queries, bucket)
    offset = 0
    while offset < num_tokens:
        queries = wide if num_tokens - offset > narrow else narrow
        offset = min(offset + queries, num_tokens)
        yield queries, start + offset


def _whole(tokens: int, size: int) -> int:
    return -(-tokens // size) * size
