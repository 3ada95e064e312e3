"""Overheads of recomputing and swapping when running requests overflow the pool: `study overflow` on this device.

Rows: `figure` (of the poster), `x` (what it varies), `mode`, `overhead_s` with the least and the largest of the seeds
(`least_s`, `most_s`), `preemptions`, `moved_tokens` and `recomputed_tokens`. Modes with pageable host memory are beside those
with page-locked memory. Last one row with `wrong`: the figures' trend checks that failed, by their sentences, of `checks`.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_suite.sizes import Row, Sizes
from jinfercept.bench.overflow import MODES, QUICK_EFFORT, OverflowEngine
from jinfercept.sim.overflow import OUR_RECOMPUTE, OUR_SWAP_BY_LAYER, OUR_SWAP_PAGEABLE
from jinfercept.sim.overflow_checks import Ways, trend_checks
from jinfercept.sim.overflow_figures import OverflowFigure, OverflowStudy, figures


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the figures, one after the other."""
    asked, found = sizes.overflow, list[OverflowFigure]()
    options: dict[str, Any] = {
        "dtype": sizes.dtype,
        "max_num_batched_tokens": asked.tokens,
        "swap_space": asked.swap_space,
    }
    with OverflowEngine(asked.model, asked.sizes, effort=QUICK_EFFORT, **options) as engine:
        study = OverflowStudy(engine.run, asked.sizes, (*MODES, OUR_SWAP_PAGEABLE), (), engine.simulated)
        for figure in figures(study, asked.figures, lambda cell: None):
            found.append(figure)
            for point in figure.points:
                yield {
                    "figure": figure.number,
                    "x": point.x,
                    "mode": point.mode,
                    "overhead_s": point.overhead_s.mean,
                    "least_s": point.overhead_s.low,
                    "most_s": point.overhead_s.high,
                    "preemptions": point.counters.preemptions,
                    "moved_tokens": point.moved_tokens,
                    "recomputed_tokens": point.counters.recomputed,
                }
    checks = trend_checks(found, {}, Ways(OUR_RECOMPUTE.name, OUR_SWAP_BY_LAYER.name))
    yield {"checks": len(checks), "wrong": [check.sentence for check in checks if not check.passed]}
