"""What a parser makes of a model's text: what a person may see, and calls as they grow. Knows no format.

Every piece has the `request_id` of the request that it came of, where a chat's reader put it into a stream.
"""

from dataclasses import dataclass
from typing import Protocol, final

from jinfercept.request import Call


@dataclass(frozen=True, slots=True)
class Content:
    """Text for a person; never markup, never half a tag."""

    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers; never markup, and no part of its content."""

    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun: it cannot turn out to be text any more.

    Attributes:
        index: counts the calls of one turn.
        name: what is called.
        id: of the call, in the form that the family's chat template takes.
    """

    index: int
    name: str
    id: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments; all of them, joined, are the `arguments` of the `Call`."""

    index: int
    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is whole. Its `span` counts characters of what was fed; its arguments are JSON, unless the model erred."""

    index: int
    call: Call
    request_id: str = ""


Piece = Content | Reasoning | CallStarted | Arguments | CallEnded


class CallParser(Protocol):
    """Reads one turn of one request; how the text is divided makes no difference to the joined pieces."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now.

        Args:
            text: what comes next, special tokens written out.
        """
        ...

    def finish(self, cut: bool = False) -> list[Piece]:
        """The turn is over; what was held back. Nothing may be fed afterwards.

        Args:
            cut: the model did not end it: what could have become markup is left out.
        """
        ...


@final
class FirstCall:
    """A parser for turns of one call: later ones are read and dropped."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return _with_first_call(self._parser.feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        return _with_first_call(self._parser.finish(cut))


def _with_first_call(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if isinstance(piece, Content | Reasoning) or piece.index == 0]
