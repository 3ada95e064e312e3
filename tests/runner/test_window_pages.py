"""Layers with a window have few pages of their own, which are used again behind the window: every number stays the same."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from jinfercept.cpu_kernels import native
from jinfercept.kv.page import PageCopy
from jinfercept.models import attention
from jinfercept.models.config import PLAIN_KIND, LayerKind
from jinfercept.models.load import load
from jinfercept.models.protocol import windows_of
from jinfercept.pallas.tiles import Tile, Tiles, work_cut
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.pallas.triton_decode import joined_attention_triton
from jinfercept.runner import steps
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import Chunk, NewPages, Sample, Score, StepPlan, StepResult, WindowCopies, WindowEntries
from tests.support.fake_runner import FakeRunner
from tests.support.tiny_model import GOLDEN

WINDOW, VOCAB, SIZE, BUCKET = 20, 128, 4, 8  # the model's window; tokens of a page, and of a step
SHAPE = RunnerShape(
    num_pages=40,
    page_size=SIZE,
    max_num_seqs=2,
    max_model_len=100,
    buckets=(BUCKET,),
    layers_per_step=2,
    staging_pages=2,
)
NUM_WINDOW_PAGES = 14
"""Two sequences see six pages each, and one of them computes up to two beside them."""
TILES = Tiles(Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), programs=8)
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (2, 72)).tolist()
type Row = tuple[int, int, int]
"""A slot, and the first token and the end of its chunk."""


class Pages:
    """The pages of one pool by sequence slot and number; those freed last are used first."""

    def __init__(self, num_pages: int, window: int | None = None) -> None:
        self.free, self.window = list(range(num_pages, 0, -1)), window
        self.tables: list[dict[int, int]] = [{}, {}]
        self.told: list[set[int]] = [set(), set()]
        self.num_used = 0

    def entries(self, slot: int, start: int, end: int) -> tuple[int, list[int]] | None:
        """The entries of new pages up to `end`, once those behind the window of the token at `start` are given back."""
        table, told = self.tables[slot], self.told[slot]
        seen = 0 if self.window is None else max(0, start - self.window + 1) // SIZE
        self.free += [table.pop(page) for page in list(table) if page < seen]
        new = [page for page in range(start // SIZE, -(-end // SIZE)) if page not in table]
        table |= {page: self.free.pop() for page in new}
        self.num_used += len(new)
        untold = [page for page in sorted(table) if page not in told]
        told |= set(untold)
        return (untold[0], [table[page] for page in untold]) if untold else None

    def leave(self, slot: int) -> list[PageCopy]:
        """Copy a sequence's pages to the host, and free them."""
        table = self.tables[slot]
        copies = [PageCopy(table[page], host) for host, page in enumerate(sorted(table))]
        self.free += table.values()
        return copies

    def come_back(self, slot: int) -> list[PageCopy]:
        """Copy them to other slots."""
        table, free = self.tables[slot], [page for page in self.free if page not in self.tables[slot].values()]
        homes = dict(zip(sorted(table), free, strict=False))
        self.tables[slot], self.told[slot] = homes, set()
        self.free = [page for page in self.free if page not in homes.values()]
        return [PageCopy(homes[page], host) for host, page in enumerate(sorted(homes))]


class Planner:
    """Makes plans of two pools."""

    def __init__(self, window: int = WINDOW) -> None:
        self.pages, self.window = Pages(SHAPE.num_pages), Pages(NUM_WINDOW_PAGES, window)
        self.number = 0

    def plan(self, rows: Sequence[Row], window: WindowCopies | None = None, **moves: Any) -> StepPlan:
        self.number += 1
        chunks = tuple(self.chunk(*row) for row in rows)
        return StepPlan(self.number, BUCKET if rows else 0, chunks, window=window, **moves)

    def chunk(self, slot: int, start: int, end: int) -> Chunk:
        """Tokens of a prompt, with a score for each and a draw behind the last."""
        pages, window = (pool.entries(slot, start, end) for pool in (self.pages, self.window))
        entries = WindowEntries(*window) if window else ()
        new = NewPages(*(pages or (0, ())), 0, entries) if pages or window else ()
        score = Score(0, tuple(PROMPTS[slot][start + 1 : end + 1]), 2)
        return Chunk(slot, start, tuple(PROMPTS[slot][start:end]), new, Sample(0.0, 0), score)


def runner(num_window_pages: int, implementation: str, name: str, **sizes: Any) -> ModelRunner:
    """Of a golden checkpoint; one without windows gets some in every second layer."""
    loaded = load(GOLDEN / name, dtype="float32")
    model, config = loaded.model, loaded.model.config
    if not windows_of(model):
        kinds = tuple(LayerKind(window=WINDOW) if index % 2 else PLAIN_KIND for index in range(config.num_layers))
        model = replace(model, config=replace(config, kinds=kinds))
    shape = replace(SHAPE, num_window_pages=num_window_pages, **sizes)
    made = ModelRunner(model, loaded.params, shape, attention=implementation)
    made.reset()
    return made


def run(made: ModelRunner, plans: Sequence[StepPlan]) -> list[StepResult]:
    """The results of plans that compute something."""
    results = [made.collect(made.submit(plan)) for plan in plans]
    made.close()
    return [result for plan, result in zip(plans, results, strict=True) if plan.chunks]


def check(plans: Sequence[StepPlan], implementation: str = "auto", name: str = "gemma3", **sizes: Any) -> None:
    """The plans give the numbers that their chunks give on one pool, where nothing moves."""
    results = run(runner(NUM_WINDOW_PAGES, implementation, name, **sizes), plans)
    planner, rows = Planner(), [[_row(chunk) for chunk in plan.chunks] for plan in plans if plan.chunks]
    others = run(runner(0, implementation, name, **sizes), [planner.plan(each) for each in rows])
    assert [result.tokens for result in results] == [result.tokens for result in others]
    assert [result.scores for result in results] == [result.scores for result in others]


def _row(chunk: Chunk) -> Row:
    return chunk.slot, chunk.start, chunk.start + len(chunk.tokens)


def interpret_triton(patch: pytest.MonkeyPatch) -> list[str]:
    """Interpret the kernels for GPUs. Returns a list that gets an entry for each kernel that rotates and writes itself."""
    own, traced = {"tiles": TILES, "interpret": True}, list[str]()

    def joined(*arguments: Any) -> Any:
        traced.append("joined")
        return joined_attention_triton(*arguments, **own)

    patch.setitem(attention.IMPLEMENTATIONS, "triton", partial(paged_attention_triton, **own))
    patch.setitem(attention.CUTS, "triton", partial(work_cut, tiles=TILES))
    patch.setattr(steps, "joined_attention", joined)
    return traced


def long_sequences(planner: Planner, decodes: int) -> list[StepPlan]:
    """A prompt in chunks, another one beside the first one's tokens, and both sequences' tokens one by one."""
    rows: list[list[Row]] = [[(0, start, start + 7)] for start in range(0, 42, 7)]
    rows += [[(0, 42 + index, 43 + index), (1, 7 * index, 7 * index + 7)] for index in range(7)]
    rows += [[(0, 49 + index, 50 + index), (1, 49 + index, 50 + index)] for index in range(decodes)]
    return [planner.plan(each) for each in rows]


@pytest.mark.parametrize(
    "implementation",
    ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "tiled"))],
)
def test_a_small_pool_for_windows_gives_the_numbers_of_one_pool(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "tiled":
        implementation = "cpu"
        monkeypatch.setattr(native, "usable", lambda: False)
    planner = Planner()
    plans = long_sequences(planner, decodes=22 if implementation == "auto" else 6)
    assert planner.window.num_used >= 2 * NUM_WINDOW_PAGES
    check(plans, implementation)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_joined"), [("gemma3", 0), ("qwen3", 2)])
def test_kernels_for_gpus_read_and_write_either_pool(
    name: str, num_joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = interpret_triton(monkeypatch)
    check(long_sequences(Planner(), decodes=6), "triton", name)
    assert len(traced) == num_joined, "decode rows in layers without windows, of both runners"


@pytest.mark.parametrize("window", [WINDOW, WINDOW - SIZE])
def test_the_fake_runner_notices_pages_that_are_given_back_too_early(window: int) -> None:
    fake = FakeRunner(SIZE, (BUCKET,), window=WINDOW)
    with nullcontext() if window == WINDOW else pytest.raises((AssertionError, KeyError)):
        for plan in long_sequences(Planner(window), decodes=22):
            fake.submit(plan)


@pytest.mark.parametrize(
    ("staging", "kv_cache_dtype"),
    [(2, "auto"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "auto"), (4, "int8"), (2, "fp8")))],
)
def test_pages_of_both_pools_leave_and_come_back_to_other_slots(staging: int, kv_cache_dtype: str) -> None:
    """Host slots and device slots have the same numbers in both pools."""
    planner = Planner()
    plans = [planner.plan([(0, start, start + 7)]) for start in range(0, 42, 7)]
    planner.window.entries(0, 42, 42)  # gives back what the next token does not see
    leaving, window = planner.pages.leave(0), planner.window.leave(0)
    copies = WindowCopies(offload=window)
    plans += [planner.plan([(1, 0, 7)], copies, offload=leaving), planner.plan([(1, 7, 14)])]
    copies, back = WindowCopies(fetch=planner.window.come_back(0)), planner.pages.come_back(0)
    assert {copy.device_slot for copy in copies.fetch}.isdisjoint(copy.device_slot for copy in window)
    first = copies._replace(fetch=copies.fetch[1:], drop=tuple(copy.host_slot for copy in copies.fetch[2:]))
    plans += [planner.plan([(1, 14, 21)], first, fetch=back, drop=tuple(copy.host_slot for copy in back[:3]))]
    plans += [planner.plan((), copies._replace(fetch=copies.fetch[:1], drop=(0,)))]
    plans += [planner.plan([(0, 42 + index, 43 + index), (1, 21 + index, 22 + index)]) for index in range(20)]
    check(plans, staging_pages=staging, kv_cache_dtype=kv_cache_dtype)
