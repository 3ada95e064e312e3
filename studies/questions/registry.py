"""`python -m studies questions`: what a reader of InferCept asks, by name, answered by simulation. Imports no JAX."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, NamedTuple

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import check_policies
from jinfercept.errors import ConfigError, nearest
from jinfercept.sim.tables import check_least, listed
from studies.answer import StudyAnswer, StudyEffort, output_folder


class Question(NamedTuple):
    """A question.

    Attributes:
        module: of this room; its function `ask` takes a `StudyEffort` and returns a `StudyAnswer`.
        summary: the question in a few words.
    """

    module: str
    summary: str

    def ask(self, effort: StudyEffort) -> StudyAnswer:
        """Find the answer. Raises as `StudyEffort.play` does."""
        ask: Callable[[StudyEffort], StudyAnswer] = import_module(f"studies.questions.{self.module}").ask
        return ask(effort)


QUESTIONS: Mapping[str, Question] = {
    "variety": Question(
        "variety", "hundreds of tools, bursts, and clients that never come back: which policies bear them"
    ),
    "estimates": Question("estimates", "predicted and actual waste and durations, and what wrong durations cost"),
    "waste": Question("waste_by_kind", "what a pause wastes in an engine that drops contexts, by kind of call"),
    "deciding": Question(
        "deciding", "where the choice of a policy matters, over machines, loads and clients that return"
    ),
    "swap_or_preserve": Question("swap_or_preserve", "swap against preserve, by kind of call and load: which wins"),
    "chunk_sizes": Question("chunk_sizes", "in what chunks a dropped context is recomputed best, by its length"),
    "architectures": Question(
        "architectures", "which policy, step and swap budget on which machine, and a wrong profile's price"
    ),
    "optimisations": Question("optimisations", "what is left to win beside prefix sharing, GQA and quantised KV"),
}


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
