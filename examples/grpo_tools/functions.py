"""What the two tools do, and how a text calls them. Imports nothing of the project: `transformers_loop.py` has only this."""

import re
import time

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


def calculate(text: str) -> str:
    """The product of two numbers; a question mark for other texts."""
    factors = re.fullmatch(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*", text)
    return "?" if factors is None else str(int(factors[1]) * int(factors[2]))


def price(text: str) -> str:
    """The price of an item; a question mark for other texts."""
    return str(PRICES.get(text.strip(), "?"))


MARKS = {"calculator": ("<<", ">>"), "price": ("[[", "]]")}
"""By tool what stands before a call and behind its result; between them there is an equals sign."""


def run_tool(name: str, arguments: str, slow_s: float) -> str:
    """The result of a call, as a loop has it that finds calls itself; the look-up takes `slow_s` seconds."""
    if name == "calculator":
        return calculate(arguments)
    time.sleep(slow_s)
    return price(arguments)


def split_call(text: str) -> "tuple[str, str] | None":
    """Name and arguments of the call that an equals sign has just ended; None if that was none."""
    starts = {text.rfind(start): name for name, (start, _) in MARKS.items()}
    at, name = max(starts.items())
    start, end = MARKS[name]
    if at < 0 or end in text[at:]:
        return None
    return name, text[at + len(start) : -1]
