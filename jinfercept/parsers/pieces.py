"""The interface of a parser of one turn's text, whose pieces are events."""

from typing import Protocol, final

from jinfercept.events import Content, Piece, Reasoning


class CallParser(Protocol):
    """Reads one turn of one request; how the text is divided makes no difference to the joined pieces."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now.

        Args:
            text: the next text, with special tokens by name.
        """
        ...

    def finish(self, cut: bool = False) -> list[Piece]:
        """The last pieces, at the end of the turn; nothing may be fed afterwards.

        Args:
            cut: the turn was cut off: text that could have become markup is dropped.
        """
        ...

    def in_call(self, text: str) -> bool:
        """Whether a text that comes next would be part of a call, or white space beside one, and not of what is shown."""
        ...


@final
class OnlyCalls:
    """A parser for turns that are calls and nothing else."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return self._parser.feed(text)

    def finish(self, cut: bool = False) -> list[Piece]:
        return self._parser.finish(cut)

    def in_call(self, text: str) -> bool:
        return True


@final
class FirstCall:
    """A parser for turns of one call: later ones are read and dropped."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return _with_first_call(self._parser.feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        return _with_first_call(self._parser.finish(cut))

    def in_call(self, text: str) -> bool:
        return self._parser.in_call(text)


def _with_first_call(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if isinstance(piece, Content | Reasoning) or piece.index == 0]
