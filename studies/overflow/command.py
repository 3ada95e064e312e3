"""`python -m studies overflow`: what it costs when running requests overflow the KV pool, by the figures of an SC24 poster.

Writes a folder: `overflow.md` (tables and trend checks) and `overflow.png`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import write_all
from jinfercept.sim.tables import numbers
from studies.answer import output_folder
from studies.overflow.batch_run import shared
from studies.overflow.figures import (
    FIGURE_6_SHARE,
    POSTER,
    QUICK,
    OverflowStudy,
    figures,
)
from studies.overflow.report import OverflowReport, draw_report, markdown

NUMBERS = (2, 3, 4, 5, 6)
SIMULATED = "Simulated: Yarn-Llama-2-7B-64k on an A100 with 40 GB"


@dataclass(frozen=True)
class StudyOverflow:
    """The command."""

    figure: Several = ()
    """2 (page size), 3 (evicted tokens), 4 (sequence length), 5 (pool) or 6 (over time) (default: all)"""
    quick: Switch = False
    """fewer and smaller cells, in under a minute"""
    out: Maybe[str] = None
    """folder to write overflow.md and overflow.png to; made if it does not exist"""

    def run(self) -> int:
        """Run the figures, and print tables and trend checks; returns 0.

        Raises:
            ConfigError: the options make no sense.
        """
        figure_numbers = self._numbers()
        folder = None if self.out is None else output_folder(self.out, ("overflow.md", "overflow.png"))
        study = OverflowStudy(QUICK if self.quick else POSTER)
        report = _report(study, figure_numbers, SIMULATED)
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


def _report(study: OverflowStudy, figure_numbers: Sequence[int], title: str) -> OverflowReport:
    with Console(stderr=True).status("") as status:
        drawn = list(figures(study, figure_numbers, status.update))
        over_time = study.figure_6(status.update) if 6 in figure_numbers else {}
    pool_pages = shared(study.sizes.batch, FIGURE_6_SHARE).pool_pages
    assert pool_pages is not None
    return OverflowReport(title, drawn, over_time, pool_pages)
