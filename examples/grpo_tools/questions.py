"""Questions from a seed, the two tools that answer them, and the reward of a sample.

A product wants the calculator, `<<17*23=391>>`, and a price the look-up, `[[tea=58]]`, which takes its time. The model writes
what stands before the result, and the answer behind it.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jinfercept import Tool
from jinfercept.rollouts.samples import Rollout

ITEMS = [
    "tea",
    "salt",
    "rice",
    "silk",
    "wool",
    "corn",
    "gold",
    "iron",
    "coal",
    "soap",
    "milk",
    "wine",
    "fish",
    "meat",
    "beer",
    "rope",
    "sand",
    "wood",
    "glass",
    "paper",
    "honey",
    "sugar",
    "flour",
    "bread",
    "cheese",
    "butter",
    "apples",
    "pears",
    "plums",
    "nuts",
    "beans",
    "eggs",
    "ink",
    "clay",
    "wax",
    "oil",
    "hay",
    "seeds",
    "bricks",
    "nails",
]
PRICES = {item: 11 + 37 * place % 89 for place, item in enumerate(ITEMS)}
"""By item, from 11 to 99."""
MARKS = {"calculator": ("<<", ">>"), "price": ("[[", "]]")}
"""By tool what stands before a call and behind its result; between them there is an equals sign."""
EXAMPLES = {"calculator": "6*8 is <<6*8=48>> 48. ", "price": "The price of rice is [[rice=85]] 85. "}
"""By tool the answered question before every question."""
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


def questions(seed: int, count: int, *, examination: bool = False) -> list[Question]:
    """Some questions, of both kinds in turn.

    Args:
        examination: of the items and factors that are held out, or of the others.
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
        made.append(question._replace(prompt=f"{EXAMPLES[question.tool]}{question.prompt}"))
    return made


def calculate(text: str) -> str:
    """The product of two numbers; a question mark for other texts."""
    factors = re.fullmatch(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*", text)
    return "?" if factors is None else str(int(factors[1]) * int(factors[2]))


def tools(slow_s: float) -> list[Tool]:
    """Both tools for the engine; a look-up takes `slow_s` seconds."""

    def price(text: str) -> str:
        time.sleep(slow_s)
        return str(PRICES.get(text.strip(), "?"))

    answers = {"calculator": calculate, "price": price}
    return [
        Tool(answers[name], name=name, start=start, stop="=", result=f"{{}}{end}")
        for name, (start, end) in MARKS.items()
    ]


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
