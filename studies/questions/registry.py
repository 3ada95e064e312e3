"""The questions of `python -m studies questions`, by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from studies.answer import StudyAnswer, StudyEffort


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
    "overload": Question("overload", "goodput past saturation; a greedy key beside others"),
    "optimisations": Question("optimisations", "what is left to win beside prefix sharing, GQA and quantised KV"),
}
