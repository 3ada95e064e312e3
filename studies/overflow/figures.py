"""Figures 2 to 6 of the SC24 poster on KV cache overflow: which batches they run, and what comes out. Draws and judges nothing.

The overhead of a cell is `T(constrained pool) - T(unconstrained pool)` of the same requests under the same engine.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from jinfercept.sched.plan_builder import SchedulerCounters
from studies.overflow.batch_run import (
    AUTO,
    OUR_RECOMPUTE,
    OUR_SWAP,
    RECOMPUTE_2024,
    SWAP_COALESCED,
    SWAP_PAGEABLE,
    SWAP_PINNED,
    BatchRequest,
    BatchRun,
    Overflow,
    OverflowMode,
    at_once,
    shared,
    simulate,
)

Progress = Callable[[str], None]
"""Called with the name of every cell before it runs."""


class OverflowSizes(NamedTuple):
    """How large the figures' batches are.

    Attributes:
        page_sizes: of Figure 2.
        evicted: tokens of the evicted context in Figure 3.
        lengths: of the requests in Figure 4; a quarter is output.
        batch: requests of Figures 5 and 6.
        shares: pools of Figure 5, over the demand.
    """

    page_sizes: tuple[int, ...]
    evicted: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: Overflow
    shares: tuple[float, ...]


POSTER = OverflowSizes(
    page_sizes=(8, 16, 32, 64, 128, 256),
    evicted=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    lengths=(512, 1024, 2048, 3072, 4096, 5120, 6144),
    batch=at_once(1500, 1024, 32),
    shares=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
"""The poster's: 1,500 tokens in, 1,024 out, 32 requests at once. It gives no lengths and no numbers of evicted tokens."""
QUICK = POSTER._replace(
    page_sizes=(8, 32, 256),
    evicted=(512, 2048, 8192),
    lengths=(512, 1536),
    batch=at_once(300, 200, 12),
    shares=(0.12, 0.3, 0.5, 1.0),
)

FIGURE_2_TOKENS = 4096
"""Evicted tokens of Figure 2, or the most of Figure 3 if that has less."""
FIGURE_4_SHARE, FIGURE_6_SHARE = 0.4, 0.12
"""Pools of these figures, over the demand. The first is ours."""
FIGURE_4_REQUESTS = 16

MODES = (RECOMPUTE_2024, SWAP_PAGEABLE, SWAP_PINNED, SWAP_COALESCED, OUR_RECOMPUTE, OUR_SWAP, AUTO)
RUN = cache(simulate)
"""Serves a batch under a mode; batches of several figures are served once."""


class OverflowPoint(NamedTuple):
    """One cell of a figure.

    Attributes:
        x: what the figure varies.
        mode: name of the mode.
        overhead_s: `T(constrained pool) - T(unconstrained pool)`.
        counters: under the constrained pool.
    """

    x: float
    mode: str
    overhead_s: float
    counters: SchedulerCounters

    @property
    def moved_tokens(self) -> int:
        """Tokens that crossed the link, both ways together."""
        return self.counters.copied_out + self.counters.copied_in


class OverflowFigure(NamedTuple):
    """A figure's cells.

    Attributes:
        number: in the poster.
        title, axis: what it shows, and what it varies.
        points: of all modes.
    """

    number: int
    title: str
    axis: str
    points: Sequence[OverflowPoint]

    @property
    def modes(self) -> list[str]:
        """The names of the modes, in order."""
        return list(dict.fromkeys(point.mode for point in self.points))

    @property
    def by_x(self) -> Mapping[float, Mapping[str, OverflowPoint]]:
        """The points by what the figure varies, ascending, and by mode."""
        by_x: dict[float, dict[str, OverflowPoint]] = {}
        for point in sorted(self.points, key=lambda point: point.x):
            by_x.setdefault(point.x, {})[point.mode] = point
        return by_x

    def curve(self, mode: str) -> list[float]:
        """Overheads of a mode, by ascending x."""
        return [cells[mode].overhead_s for cells in self.by_x.values() if mode in cells]


Cell = tuple[float, Overflow]


class OverflowStudy(NamedTuple):
    """The figures of batches of these sizes."""

    sizes: OverflowSizes

    def figures(self, progress: Progress) -> list[OverflowFigure]:
        """Figures 2 to 5."""
        return [make(progress) for make in (self.figure_2, self.figure_3, self.figure_4, self.figure_5)]

    def figure_2(self, progress: Progress) -> OverflowFigure:
        """Overhead by page size: as in Figure 3, so that page sizes change no decision of the scheduler."""
        evicted, evicting = min(FIGURE_2_TOKENS, max(self.sizes.evicted)), cache(self._evicting)

        def cells(mode: OverflowMode) -> list[Cell]:
            return [(size, evicting(evicted, size, engine_of(mode))) for size in self.sizes.page_sizes]

        title = f"overhead by page size, {evicted:,} tokens evicted"
        modes = [mode for mode in MODES if mode.preemption != "auto"]
        return self._figure(2, title, "tokens per page", cells, modes, progress)

    def figure_3(self, progress: Progress) -> OverflowFigure:
        """Overhead by evicted tokens: one context gives way to the last page of an older request."""
        size, evicting = self.sizes.batch.page_size, cache(self._evicting)

        def cells(mode: OverflowMode) -> list[Cell]:
            return [(evicted, evicting(evicted, size, engine_of(mode))) for evicted in self.sizes.evicted]

        return self._figure(3, "overhead by evicted tokens", "evicted tokens", cells, MODES, progress)

    def figure_4(self, progress: Progress) -> OverflowFigure:
        """Overhead by sequence length at batch 16."""
        size = self.sizes.batch.page_size
        cells = [
            (length, shared(at_once(length - length // 4, length // 4, FIGURE_4_REQUESTS, size), FIGURE_4_SHARE))
            for length in self.sizes.lengths
        ]
        title = f"overhead by sequence length, {FIGURE_4_REQUESTS} requests"
        return self._figure(4, title, "tokens per request", lambda mode: cells, MODES, progress)

    def figure_5(self, progress: Progress) -> OverflowFigure:
        """Overhead by pool."""
        cells = [(round(100 * share), shared(self.sizes.batch, share)) for share in self.sizes.shares]
        return self._figure(5, "overhead by pool", "pool, % of demand", lambda mode: cells, MODES, progress)

    def figure_6(self, progress: Progress) -> Mapping[str, BatchRun]:
        """Runs at 12 % of the demand, whose steps show throughput and usage over time."""
        batch = shared(self.sizes.batch, FIGURE_6_SHARE)
        runs = {}
        for mode in (RECOMPUTE_2024, SWAP_PINNED):
            progress(f"figure 6: {mode.name}")
            runs[mode.name] = RUN(mode, batch)
        return runs

    def _figure(
        self,
        number: int,
        title: str,
        axis: str,
        cells: Callable[[OverflowMode], Sequence[Cell]],
        modes: Sequence[OverflowMode],
        progress: Progress,
    ) -> OverflowFigure:
        points = list[OverflowPoint]()
        for mode in modes:
            for x, overflow in cells(mode):
                progress(f"figure {number}: {x:g}, {mode.name}")
                free, short = RUN(_alone(mode), overflow._replace(pool_pages=None)), RUN(mode, overflow)
                assert short.streams == free.streams, "overflow changes no token"
                points.append(OverflowPoint(x, mode.name, short.seconds - free.seconds, short.counters))
        return OverflowFigure(number, title, axis, points)

    def _evicting(self, evicted: int, page_size: int, engine: OverflowMode) -> Overflow:
        """Two requests whose pool is just so small that the younger one is evicted when the older one takes its last page.

        The older one decodes until the younger one's prompt is computed. It ends a step after it takes its last page, so that
        the time that the younger one waits for it hardly counts, and with any page size at the same token. The younger one's
        pages fill at other steps than the older one's.
        """
        largest = max(self.sizes.page_sizes)
        prompt = largest // 2
        output = largest * -(-(prompt + 32 + evicted // 100) // largest) + 3 - prompt
        requests = (BatchRequest(prompt, output), BatchRequest(evicted - 4, output + 32))
        free = Overflow(requests, page_size, None)
        peak = RUN(engine, free).peak_pages
        for pages in range(peak - 1, peak // 2, -1):
            if RUN(engine, free._replace(pool_pages=pages)).counters.preemptions:
                return free._replace(pool_pages=pages)
        raise AssertionError("no pool evicts the younger request")


def _alone(mode: OverflowMode) -> OverflowMode:
    """The mode's engine where nothing overflows."""
    return engine_of(mode)._replace(by_layer=mode.by_layer, pinned=mode.pinned)


def engine_of(mode: OverflowMode) -> OverflowMode:
    """The mode in which the same engine recomputes: one for all modes whose plans are alike."""
    return OverflowMode("", "recompute", mode.engine)
