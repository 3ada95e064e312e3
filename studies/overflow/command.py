"""`python -m studies overflow`: what it costs when running requests overflow the KV pool, by the figures of an SC24 poster."""

from dataclasses import dataclass

from rich.console import Console

from jinfercept.cli.options import Maybe, Switch
from studies.answer import output_folder
from studies.overflow.batch_run import shared
from studies.overflow.figures import FIGURE_6_SHARE, POSTER, QUICK, OverflowStudy
from studies.overflow.report import OverflowReport, markdown

SIMULATED = "Simulated: Yarn-Llama-2-7B-64k on an A100 with 40 GB"


@dataclass(frozen=True)
class StudyOverflow:
    """The command."""

    quick: Switch = False
    """fewer and smaller cells, in under a minute"""
    out: Maybe[str] = None
    """folder to write overflow.md to; made if it does not exist"""

    def run(self) -> int:
        """Run the figures, and print tables and trend checks; returns 0. Raises `ConfigError` if `out` cannot be written."""
        page = None if self.out is None else output_folder(self.out, ("overflow.md",)) / "overflow.md"
        study = OverflowStudy(QUICK if self.quick else POSTER)
        with Console(stderr=True).status("") as status:
            drawn, over_time = study.figures(status.update), study.figure_6(status.update)
        pool_pages = shared(study.sizes.batch, FIGURE_6_SHARE).pool_pages
        assert pool_pages is not None
        text = markdown(OverflowReport(SIMULATED, drawn, over_time, pool_pages))
        print(text)
        if page is not None:
            page.write_text(text, encoding="utf-8")
            print(f"written: {page}")
        return 0
