"""One turn of generated text: its pieces, and its calls with the tokens that they span."""

from bisect import bisect_right
from dataclasses import replace
from typing import final

from jinfercept.calls import Call
from jinfercept.events import CallEnded, Piece
from jinfercept.parsers.pieces import CallParser


@final
class ParsedTurn:
    """A turn's parser, its calls so far, and where in the turn's text each token begins.

    Attributes:
        calls: the complete calls, with spans in characters of the turn.
    """

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self.calls: list[Call] = []
        self._starts: list[int] = []
        self._tokens: list[int] = []
        self._length = 0
        self._early: list[Piece] = []
        self._num_early = 0

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
        return self._read(text)

    def finish(self, text: str = "", cut: bool = False) -> list[Piece]:
        """The last pieces, at the end of the turn.

        Args:
            text: the rest of the turn's text.
            cut: see `CallParser.finish`.
        """
        return self._read(text) + self._noted(self._parser.finish(cut))

    def in_call(self, before: str, text: str) -> bool:
        """Whether a text is part of a call, or white space beside one.

        Args:
            before: certain text in front of it, with which the next `feed` or `finish` begins; it is read now.
            text: see above.
        """
        self._early += self._noted(self._parser.feed(before[self._num_early :]))
        self._num_early = max(self._num_early, len(before))
        return self._parser.in_call(text)

    def spanning_tokens(self) -> tuple[Call, ...]:
        """The calls, with spans in tokens of the request."""
        return tuple(replace(call, span=self._tokens_of(*call.span)) for call in self.calls)

    def _read(self, text: str) -> list[Piece]:
        """The pieces that are certain with a text, of which some may have been read."""
        early, self._early = self._early, []
        text, self._num_early = text[self._num_early :], 0
        return early + (self._noted(self._parser.feed(text)) if text else [])

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallEnded):
                self.calls.append(piece.call)
        return pieces

    def _tokens_of(self, first: int, end: int) -> tuple[int, int]:
        owners = [self._tokens[bisect_right(self._starts, char) - 1] for char in (first, end - 1)]
        return owners[0], owners[1] + 1
