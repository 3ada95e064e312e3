"""`python -m studies overflow`: what it costs when running requests overflow the KV pool, by the figures of an SC24 poster.

Writes a folder: `overflow.md` (tables and trend checks) and `overflow.png`.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import write_all
from jinfercept.sim.tables import numbers
from studies.answer import output_folder
from studies.overflow.batch_run import RECOMPUTE_2024, SWAP_PINNED, BatchRun, Overflow, OverflowMode, shared, simulate
from studies.overflow.checks import Ways
from studies.overflow.figures import (
    FIGURE_6_SHARE,
    MODES_2024,
    OUR_MODES,
    POSTER,
    QUICK,
    OverflowSizes,
    OverflowStudy,
    figures,
)
from studies.overflow.report import OverflowReport, draw_report, markdown

if TYPE_CHECKING:
    from studies.overflow.real_engine import OverflowEngine

NUMBERS = (2, 3, 4, 5, 6)
SIMULATED = "Simulated: Yarn-Llama-2-7B-64k on an A100 with 40 GB"


@dataclass(frozen=True)
class StudyOverflow:
    """The command."""

    figure: Several = ()
    """2 (page size), 3 (evicted tokens), 4 (sequence length), 5 (pool) or 6 (over time) (default: all)"""
    model: Maybe[str] = None
    """measure the real engine on this machine with a model, and compare it with the simulator: dummy (a small Llama with YaRN
    and random weights), smollm2-135m, a directory or a file (default: simulate the poster's machine)"""
    processor_time: Switch = False
    """with --model: keep to one core and count processor seconds, which other programs disturb less than wall seconds"""
    quick: Switch = False
    """fewer and smaller cells, in under a minute"""
    out: Maybe[str] = None
    """folder to write overflow.md and overflow.png to; made if it does not exist"""

    def run(self) -> int:
        """Run the figures, and print tables and trend checks; returns 0.

        Raises:
            ConfigError: the options make no sense.
            ModelError: the model cannot be found, read or used.
        """
        figure_numbers = self._numbers()
        folder = None if self.out is None else output_folder(self.out, ("overflow.md", "overflow.png"))
        if self.model is None:
            modes, over_time = (*MODES_2024, *OUR_MODES), (RECOMPUTE_2024, SWAP_PINNED)
            study = OverflowStudy(cache(_simulated), QUICK if self.quick else POSTER, modes, over_time, _simulated)
            report = _report(study, figure_numbers, SIMULATED)
        else:
            from studies.overflow.real_engine import (
                DUMMY,
                EFFORT,
                MODEL_SIZES,
                QUICK_EFFORT,
                QUICK_SIZES,
                SIZES,
                OverflowEngine,
                on_one_core,
            )

            sizes = QUICK_SIZES if self.quick else SIZES if self.model == DUMMY else MODEL_SIZES
            effort = EFFORT if self.model == DUMMY and not self.quick else QUICK_EFFORT
            clock = time.process_time if self.processor_time else time.perf_counter
            with (
                on_one_core() if self.processor_time else nullcontext(),
                OverflowEngine(self.model, sizes, effort=effort, clock=clock) as engine,
            ):
                seconds = (
                    "processor seconds on one core" if self.processor_time else f"wall seconds on {engine.machine}"
                )
                report = measured_report(engine, sizes, f"{self.model} in float32, {seconds}", figure_numbers)
        text = markdown(report)
        print(text)
        if folder is not None:
            paths = folder / "overflow.md", folder / "overflow.png"
            write_all(
                {
                    str(paths[0]): lambda: paths[0].write_text(text, encoding="utf-8"),
                    str(paths[1]): lambda: draw_report(paths[1], report),
                }
            )
            print(f"written: {paths[0]}, {paths[1]}")
        return 0

    def _numbers(self) -> list[int]:
        figure_numbers = numbers("--figure", self.figure or ("2,3,4,5,6",), int)
        if wrong := [number for number in figure_numbers if number not in NUMBERS]:
            raise ConfigError("the study has no such figure", got=", ".join(map(str, wrong)), fix="2, 3, 4, 5 or 6")
        return figure_numbers


def _simulated(mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
    return simulate(mode, overflow)


def measured_report(
    engine: "OverflowEngine", sizes: OverflowSizes, what: str, figure_numbers: Sequence[int]
) -> OverflowReport:
    """The real engine's figures, and the simulator's beside them."""
    from studies.overflow.real_engine import MODES, OVER_TIME

    study = OverflowStudy(engine.run, sizes, MODES, OVER_TIME, engine.simulated)
    report = _report(study, figure_numbers, f"Measured: {what}")
    twin = study._replace(run=cache(engine.simulated), sizes=sizes._replace(seeds=1, repeats=1))
    return report._replace(simulated=tuple(figures(twin, figure_numbers, lambda cell: None)))


def _report(study: OverflowStudy, figure_numbers: Sequence[int], title: str) -> OverflowReport:
    with Console(stderr=True).status("") as status:
        drawn = list(figures(study, figure_numbers, status.update))
        over_time = study.figure_6(status.update) if 6 in figure_numbers else {}
    pool_pages = shared(study.sizes.batch, FIGURE_6_SHARE).pool_pages
    assert pool_pages is not None
    return OverflowReport(title, drawn, over_time, pool_pages, Ways(*(mode.name for mode in study.over_time)))
