"""The questions of `jinfercept study questions`, by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from jinfercept.studies.answer import Answer, Effort


class Question(NamedTuple):
    """A question.

    Attributes:
        module: of this room; its function `ask` takes an `Effort` and returns an `Answer`.
        summary: the question in a few words.
    """

    module: str
    summary: str

    def ask(self, effort: Effort) -> Answer:
        """Find the answer. Raises as `Effort.play` does."""
        ask: Callable[[Effort], Answer] = import_module(f"jinfercept.studies.{self.module}").ask
        return ask(effort)


QUESTIONS: Mapping[str, Question] = {
    "waste": Question("waste_by_kind", "what a pause wastes in an engine that drops contexts, by kind of call"),
}
