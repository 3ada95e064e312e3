"""Hand-made plans that fill a bucket, for measuring a runner. Their pages hold no context of a request."""

import math
from dataclasses import replace
from typing import Any, Protocol

from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import Chunk, NewPages, Sample, StepPlan, WindowEntries

Row = tuple[int, int]
"""First position and number of a row's query tokens."""


class PlanRunner(Protocol):
    """Runs plans; as `engine.ports.Runner`, without masks."""

    def submit(self, plan: StepPlan) -> Any: ...

    def collect(self, ticket: Any) -> Any: ...


def probe(shape: RunnerShape, bucket: int, rows: list[Row]) -> StepPlan:
    """A plan of such rows. Pages are consecutive, and the first page follows the last of the pool."""
    chunks, used = [], 0
    for slot, (start, num_tokens) in enumerate(rows):
        end = start + num_tokens
        num_pages = -(-end // shape.page_size)
        pages = range(used, used + num_pages)
        state = 1 + slot % shape.num_states if shape.num_states else 0
        new_pages = NewPages(0, [1 + page % shape.num_pages for page in pages], state)
        if shape.num_window_pages:
            entries = WindowEntries(0, [1 + page % shape.num_window_pages for page in pages])
            new_pages = new_pages._replace(window=entries)
        used += num_pages
        chunks.append(Chunk(slot, start, (0,) * num_tokens, new_pages, Sample(0.0, 0, end)))
    return StepPlan(0, bucket, tuple(chunks))


def settled(plan: StepPlan) -> StepPlan:
    """The same plan once its page tables are set up."""
    return replace(plan, chunks=tuple(chunk._replace(new_pages=()) for chunk in plan.chunks))


def full_rows(shape: RunnerShape, bucket: int, context_tokens: int) -> list[Row]:
    """Rows that fill a bucket: rows that decode, with equal contexts, and chunks from the first token on for the rest.

    If every token of the bucket can have a row, there are no chunks.

    Args:
        context_tokens: tokens that all rows together read; the nearest possible number counts.
    """
    most, num_rows = longest(shape), min(bucket, shape.max_num_seqs)
    num_chunks = min(num_rows, math.ceil((bucket - num_rows) / (most - 1)))
    num_decoding = num_rows - num_chunks
    rest = min(bucket - num_decoding, num_chunks * most)
    chunks = [(0, (rest + index) // num_chunks) for index in range(num_chunks)]
    length = max(1, min(most, (context_tokens - rest) // max(1, num_decoding)))
    return [(length - 1, 1)] * num_decoding + chunks


def longest(shape: RunnerShape) -> int:
    """Tokens of the longest sequence that fits."""
    return max(2, min(shape.max_model_len, shape.num_pages * shape.page_size))


def widest(shape: RunnerShape) -> int:
    """The bucket in which the most rows decode and nothing else is computed."""
    return max((size for size in shape.buckets if size <= shape.max_num_seqs), default=shape.buckets[0])
