"""The interface of a parser of one turn's text, whose pieces are events."""

from typing import Protocol

from jinfercept.events import Piece


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
