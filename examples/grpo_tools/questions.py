"""Questions from a seed, the two tools that answer them, and the reward of a sample.

A product wants the calculator, `<<17*23=391>>`, and a price the look-up, `[[tea=11]]`, which takes its time. The model writes
what stands before the result, and the answer behind it.
"""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from examples.grpo_tools.functions import ITEMS, MARKS, PRICES, run_tool
from jinfercept import Tool
from jinfercept.rollouts.samples import Rollout

HELD_OUT = 8
"""Of every so many items and first factors one is asked for in examinations only."""
MAX_TOKENS = 16
"""That a sample may generate."""
STOPS = (".", "\n")


class Question(NamedTuple):
    """What is asked.

    Attributes:
        prompt: ends where the model goes on.
        tool: name of the one to be called.
        arguments: that it is to get.
        answer: its result, which the model has to repeat.
    """

    prompt: str
    tool: Literal["calculator", "price"]
    arguments: str
    answer: str


def questions(seed: int, count: int, *, examination: bool = False, shots: int = 1) -> list[Question]:
    """Some questions, of both kinds in turn.

    Args:
        examination: of the items and factors that are held out, or of the others.
        shots: examples before each.
    """
    rng = random.Random(f"{seed} {examination}")
    items = [item for place, item in enumerate(ITEMS) if (place % HELD_OUT == 0) == examination]
    factors = [number for number in range(11, 100) if (number % HELD_OUT == 0) == examination]
    made = list[Question]()
    for number in range(count):
        if number % 2:
            item = rng.choice(items)
            question = Question(f"The price of {item} is", "price", item, str(PRICES[item]))
        else:
            first, second = rng.choice(factors), rng.randint(11, 99)
            question = Question(f"{first}*{second} is", "calculator", f"{first}*{second}", str(first * second))
        made.append(question._replace(prompt=f"{_examples(question.tool, shots)}{question.prompt}"))
    return made


def _examples(tool: str, count: int) -> str:
    """Answered questions for one tool, the same before every question."""
    if tool == "price":
        return "".join(
            f"The price of {item} is [[{item}={PRICES[item]}]] {PRICES[item]}. " for item in ITEMS[2 : 2 + count]
        )
    pairs = [(6 + 7 * place % 90, 8 + 5 * place % 90) for place in range(count)]
    return "".join(f"{a}*{b} is <<{a}*{b}={a * b}>> {a * b}. " for a, b in pairs)


def tools(slow_s: float) -> list[Tool]:
    """Both tools for the engine."""

    def tool(name: str) -> Tool:
        start, end = MARKS[name]
        return Tool(lambda text: run_tool(name, text, slow_s), name=name, start=start, stop="=", result=f"{{}}{end}")

    return [tool(name) for name in MARKS]


def reward(question: Question, sample: Rollout) -> float:
    """0.2 for calling the tool first, 0.6 for the right arguments, 1 for the right answer behind the result, too."""
    return reward_of(question, sample.text, [(call.name, call.arguments) for call in sample.calls])


def reward_of(question: Question, text: str, calls: Sequence[tuple[str, str]]) -> float:
    """As `reward`, of a text with results and its calls, by name and arguments."""
    if not calls or calls[0][0] != question.tool:
        return 0.0
    if calls[0][1].strip() != question.arguments:
        return 0.2
    repeated = text.partition(MARKS[question.tool][1])[2].strip(" .\n")
    return 1.0 if repeated == question.answer else 0.6
