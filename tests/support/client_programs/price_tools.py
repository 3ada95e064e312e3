"""What the client programs run, ask and print."""

import json

QUESTIONS = ("How much is a lamp?", "And two?")
BRIEF = "Be brief."


def price(item: str) -> str:
    """The price of an item.

    Args:
        item: what it is.
    """
    return {"lamp": "23", "pen": "4"}[item]


def stock(item: str) -> str:
    """How many there are.

    Args:
        item: what it is.
    """
    raise ValueError("not for sale")


def report(text: str, pieces: int | None = None) -> None:
    """Print an answer, and the number of pieces in which it came."""
    print()  # ends a line that a library has begun
    print(json.dumps({"text": text, "pieces": pieces}), flush=True)
