"""One turn of generated text: its pieces, and its calls with the tokens that they span. Knows no format."""

from bisect import bisect_right
from dataclasses import replace
from typing import final

from jinfercept.events import CallEnded, Piece
from jinfercept.parsers.pieces import CallParser
from jinfercept.request import Call


@final
class ParsedTurn:
    """A turn's parser, its calls so far, and where in the turn's text each token begins.

    Args:
        parser: of this turn.

    Attributes:
        calls: the complete calls, with spans in characters of the turn.
    """

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self.calls: list[Call] = []
        self._starts: list[int] = []
        self._tokens: list[int] = []
        self._length = 0

    def feed(self, index: int, num_chars: int, text: str) -> list[Piece]:
        """The pieces that are certain with the next token.

        Args:
            index: place of the token in the request's `token_ids`.
            num_chars: characters that the token adds to the turn, now or once they are certain.
            text: the text that is certain now.
        """
        self._starts.append(self._length)
        self._tokens.append(index)
        self._length += num_chars
        return self._noted(self._parser.feed(text)) if text else []

    def finish(self, text: str = "", cut: bool = False) -> list[Piece]:
        """The last pieces, at the end of the turn.

        Args:
            text: the rest of the turn's text.
            cut: see `CallParser.finish`.
        """
        return self._noted(self._parser.feed(text)) + self._noted(self._parser.finish(cut))

    def spanning_tokens(self) -> tuple[Call, ...]:
        """The calls, with spans in tokens of the request."""
        return tuple(replace(call, span=self._tokens_of(*call.span)) for call in self.calls)

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallEnded):
                self.calls.append(piece.call)
        return pieces

    def _tokens_of(self, first: int, end: int) -> tuple[int, int]:
        owners = [self._tokens[bisect_right(self._starts, char) - 1] for char in (first, end - 1)]
        return owners[0], owners[1] + 1
