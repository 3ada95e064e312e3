"""`python -m studies deciding`: where the choice of a policy matters. Imports no JAX."""

import os
from dataclasses import dataclass

from rich.console import Console

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import check_policies
from jinfercept.sim.reports import check_least, listed
from studies.answer import StudyEffort, output_folder
from studies.deciding.report import ask


@dataclass(frozen=True)
class StudyDeciding:
    """The command."""

    quick: Switch = False
    """a few small cells, in seconds"""
    seed: int = 0
    """of the requests"""
    policy: Several = ()
    """policies to compare too, by name or as path.py:Class"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: Maybe[str] = None
    """folder to write a page, a picture and a CSV file to; made if it does not exist"""

    def run(self) -> int:
        """Print tables and findings; returns 0, or 130 after Ctrl-C.

        Raises:
            ConfigError: the options make no sense, or a run failed.
        """
        check_least("--jobs", self.jobs, 1)
        policies = listed(self.policy)
        check_policies(policies)
        folder = None if self.out is None else output_folder(self.out, ("deciding.md", "deciding.png", "deciding.csv"))
        try:
            answer = ask(StudyEffort(self.quick, self.jobs, self.seed, Console(stderr=True), policies))
        except KeyboardInterrupt:
            return 130
        answer.show()
        if folder is not None:
            print(f"\nwritten: {', '.join(map(str, answer.write(folder, 'deciding')))}")
        return 0
