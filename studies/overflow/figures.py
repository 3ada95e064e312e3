"""Figures 2 to 6 of the SC24 poster on KV cache overflow: which batches they run, and what comes out. Draws and judges nothing.

The overhead of a cell is `T(constrained pool) - T(unconstrained pool)` of the same requests under the same engine, which serves
them in turns with either pool, so that a machine that becomes slower or faster does so for both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import NamedTuple

from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sim.reports import Range
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
)

Progress = Callable[[str], None]
"""Called with the name of every cell before it runs."""

Run = Callable[[OverflowMode, Overflow, int], BatchRun]
"""Serves a batch under a mode; the last argument is a seed, of the prompts' tokens."""


class OverflowSizes(NamedTuple):
    """How large the figures' batches are.

    Attributes:
        page_sizes: of Figure 2.
        evicted: tokens of the evicted context in Figure 3.
        lengths: of the requests in Figure 4; a quarter is output.
        batch: requests of Figures 5 and 6.
        shares: pools of Figure 5, over the demand.
        seeds: of the prompts of every cell.
        repeats: turns of every seed; of each step the fastest run counts, see `overhead_s`.
    """

    page_sizes: tuple[int, ...]
    evicted: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: Overflow
    shares: tuple[float, ...]
    seeds: int = 1
    repeats: int = 1


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

MODES_2024 = (RECOMPUTE_2024, SWAP_PAGEABLE, SWAP_PINNED, SWAP_COALESCED)
OUR_MODES = (OUR_RECOMPUTE, OUR_SWAP, AUTO)


class OverflowPoint(NamedTuple):
    """One cell of a figure.

    Attributes:
        x: what the figure varies.
        mode: name of the mode.
        overhead_s: over the seeds.
        counters: of the last seed, under the constrained pool.
    """

    x: float
    mode: str
    overhead_s: Range
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
        """Mean overheads of a mode, by ascending x."""
        return [cells[mode].overhead_s.mean for cells in self.by_x.values() if mode in cells]


Cell = tuple[float, Overflow]


class OverflowStudy(NamedTuple):
    """A machine, and the sizes of its figures.

    Attributes:
        run: serves a batch.
        sizes: of the batches.
        modes: that the machine can be in.
        over_time: those of Figure 6.
        plan: serves a batch without computing it, where only the plans matter.
    """

    run: Run
    sizes: OverflowSizes
    modes: Sequence[OverflowMode]
    over_time: Sequence[OverflowMode]
    plan: Run

    def figure_2(self, progress: Progress) -> OverflowFigure:
        """Overhead by page size: as in Figure 3, so that page sizes change no decision of the scheduler."""
        evicted, evicting = min(FIGURE_2_TOKENS, max(self.sizes.evicted)), cache(self._evicting)

        def cells(mode: OverflowMode) -> list[Cell]:
            return [(size, evicting(evicted, size, engine_of(mode))) for size in self.sizes.page_sizes]

        title = f"overhead by page size, {evicted:,} tokens evicted"
        modes = [mode for mode in self.modes if mode.preemption != "auto"]
        return self._figure(2, title, "tokens per page", cells, modes, progress)

    def figure_3(self, progress: Progress) -> OverflowFigure:
        """Overhead by evicted tokens: one context gives way to the last page of an older request."""
        size, evicting = self.sizes.batch.page_size, cache(self._evicting)

        def cells(mode: OverflowMode) -> list[Cell]:
            return [(evicted, evicting(evicted, size, engine_of(mode))) for evicted in self.sizes.evicted]

        return self._figure(3, "overhead by evicted tokens", "evicted tokens", cells, self.modes, progress)

    def figure_4(self, progress: Progress) -> OverflowFigure:
        """Overhead by sequence length at batch 16."""
        size = self.sizes.batch.page_size
        cells = [
            (length, shared(at_once(length - length // 4, length // 4, FIGURE_4_REQUESTS, size), FIGURE_4_SHARE))
            for length in self.sizes.lengths
        ]
        title = f"overhead by sequence length, {FIGURE_4_REQUESTS} requests"
        return self._figure(4, title, "tokens per request", lambda mode: cells, self.modes, progress)

    def figure_5(self, progress: Progress) -> OverflowFigure:
        """Overhead by pool."""
        cells = [(round(100 * share), shared(self.sizes.batch, share)) for share in self.sizes.shares]
        return self._figure(5, "overhead by pool", "pool, % of demand", lambda mode: cells, self.modes, progress)

    def figure_6(self, progress: Progress) -> Mapping[str, BatchRun]:
        """Runs at 12 % of the demand, whose steps show throughput and usage over time."""
        batch = shared(self.sizes.batch, FIGURE_6_SHARE)
        runs = {}
        for mode in self.over_time:
            progress(f"figure 6: {mode.name}")
            runs[mode.name] = self.run(mode, batch, 0)
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
        by_mode = {mode: dict(cells(mode)) for mode in modes}
        points = list[OverflowPoint]()
        for x in by_mode[modes[0]]:
            overheads: dict[OverflowMode, list[float]] = {mode: [] for mode in modes}
            counters: dict[OverflowMode, SchedulerCounters] = {}
            for seed in range(self.sizes.seeds):
                progress(f"figure {number}: {x:g}, seed {seed}")
                constrained = {mode: (mode, by_mode[mode][x]) for mode in modes}
                free = {mode: (_alone(mode), by_mode[mode][x]._replace(pool_pages=None)) for mode in modes}
                runs = self._in_turns([*free.values(), *constrained.values()], seed)
                for mode in modes:
                    without, within = runs[free[mode]], runs[constrained[mode]]
                    assert within[0].streams == without[0].streams, "overflow changes no token"
                    overheads[mode].append(overhead_s(without, within))
                    counters[mode] = within[0].counters
            points += [OverflowPoint(x, mode.name, spread(overheads[mode]), counters[mode]) for mode in modes]
        return OverflowFigure(number, title, axis, points)

    def _in_turns(
        self, batches: Sequence[tuple[OverflowMode, Overflow]], seed: int
    ) -> Mapping[tuple[OverflowMode, Overflow], Sequence[BatchRun]]:
        """The runs of each of these batches, one after the other, as often as there are repeats."""
        runs: dict[tuple[OverflowMode, Overflow], list[BatchRun]] = {batch: [] for batch in batches}
        for _ in range(self.sizes.repeats):
            for batch, past in runs.items():
                past.append(self.run(*batch, seed))
        return runs

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
        peak = self.plan(engine, free, 0).peak_pages
        for pages in range(peak - 1, peak // 2, -1):
            if self.plan(engine, free._replace(pool_pages=pages), 0).counters.preemptions:
                return free._replace(pool_pages=pages)
        raise AssertionError("no pool evicts the younger request")


def overhead_s(unconstrained: Sequence[BatchRun], constrained: Sequence[BatchRun]) -> float:
    """`T(constrained) - T(unconstrained)`, from runs whose plans are the same in each.

    Of each step the fastest run counts, since what disturbs a step only adds to it. The steps up to the first at which the
    plans of both differ are left out: they are the same.
    """
    both = zip(unconstrained[0].steps, constrained[0].steps, strict=False)
    same = sum(1 for _ in takewhile(lambda steps: steps[0].plan == steps[1].plan, both))
    return fastest_s(constrained, same) - fastest_s(unconstrained, same)


def fastest_s(runs: Sequence[BatchRun], first: int = 0) -> float:
    """Seconds of the steps from `first` on, of each the fastest of the runs."""
    durations = [
        [step.at_s - before for before, step in zip([0.0, *(step.at_s for step in run.steps)], run.steps, strict=False)]
        for run in runs
    ]
    return sum(min(step) for step in list(zip(*durations, strict=True))[first:])


def spread(values: Sequence[float]) -> Range:
    """Their mean, with the least and the largest."""
    return Range(sum(values) / len(values), min(values), max(values))


def _alone(mode: OverflowMode) -> OverflowMode:
    """The mode's engine where nothing overflows."""
    return engine_of(mode)._replace(by_layer=mode.by_layer, pinned=mode.pinned)


def engine_of(mode: OverflowMode) -> OverflowMode:
    """The mode in which the same engine recomputes: one for all modes whose plans are alike."""
    return OverflowMode("", "recompute", mode.engine)


def figures(study: OverflowStudy, numbers: Sequence[int], progress: Progress) -> Iterator[OverflowFigure]:
    """Those of Figures 2 to 5 that are asked for, in order."""
    makers = {2: study.figure_2, 3: study.figure_3, 4: study.figure_4, 5: study.figure_5}
    for number, make in makers.items():
        if number in numbers:
            yield make(progress)
