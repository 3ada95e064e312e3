"""`python -m studies questions`: what a reader of InferCept asks, answered by simulation. Imports no JAX."""

import os
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import check_policies
from jinfercept.errors import ConfigError, nearest
from jinfercept.sim.tables import check_least, listed
from studies.answer import StudyEffort
from studies.output_folder import output_folder
from studies.questions.registry import QUESTIONS

_LIST = "; ".join(f"{name}: {question.summary}" for name, question in QUESTIONS.items())


@dataclass(frozen=True)
class StudyQuestions:
    """The command."""

    names: Annotated[
        conf.Positional[tuple[str, ...]], conf.arg(metavar="[QUESTION ...]", help=f"{_LIST} (default: all)")
    ] = ()
    quick: Switch = False
    """a few small cells of each question, in seconds"""
    seed: int = 0
    """of the requests"""
    policy: Several = ()
    """policies to compare too, by name or as path.py:Class; for the question `deciding`"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: Maybe[str] = None
    """folder to write a page, a picture and a CSV file of each question to; made if it does not exist"""

    def run(self) -> int:
        """Answer the questions, and print tables and findings; returns 0, or 130 after Ctrl-C.

        Raises:
            ConfigError: the options make no sense, or a run failed.
        """
        chosen = self.names or tuple(QUESTIONS)
        for name in chosen:
            if name not in QUESTIONS:
                fix = f"one of {', '.join(QUESTIONS)}"
                raise ConfigError("no such question", got=name + nearest(name, tuple(QUESTIONS)), fix=fix)
        check_least("--jobs", self.jobs, 1)
        policies = listed(self.policy)
        check_policies(policies)
        if policies and "deciding" not in chosen:
            raise ConfigError(
                "--policy is for the question deciding", got=", ".join(chosen), fix="ask it too, or leave it out"
            )
        files = (f"{name}.{suffix}" for name in chosen for suffix in ("md", "png", "csv"))
        folder = None if self.out is None else output_folder(self.out, files)
        effort = StudyEffort(self.quick, self.jobs, self.seed, Console(stderr=True), policies)
        for name in dict.fromkeys(chosen):
            effort.console.print(f"{name}: {QUESTIONS[name].summary}")
            try:
                answer = QUESTIONS[name].ask(effort)
            except KeyboardInterrupt:
                return 130
            answer.show()
            if folder is not None:
                print(f"\nwritten: {', '.join(map(str, answer.write(folder, name)))}")
        return 0
