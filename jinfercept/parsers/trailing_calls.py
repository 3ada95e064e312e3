"""Calls at the end of reasoning that never closes: some models forget to close it, and an agent would wait for ever.

Only complete calls of tools that are offered count, with nothing but white space between and behind them; a call that text
follows is only thought of.
"""

from collections.abc import Callable, Collection
from typing import final

from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece
from jinfercept.parsers.pieces import CallParser
from jinfercept.parsers.source import Marks


@final
class TrailingCalls:
    """Reads reasoning while it comes; how the text is divided makes no difference.

    Args:
        tags: the tags of the format of calls, with which a call begins.
        names: the tools that are offered; None if unknown.

    Attributes:
        start: the number of characters so far that belong to no call at the end.
    """

    def __init__(self, tags: tuple[str, ...], parser: Callable[[], CallParser], names: Collection[str] | None) -> None:
        self._arguments = tags, parser, names
        self._marks, self._make, self._names = Marks(tags), parser, names
        self.start = 0
        self._tail = ""  # from `start` on
        self._parser: CallParser | None = None  # of the tail, if it begins with a tag
        self._num_read = 0  # characters of the tail that it has read
        self._pieces: list[CallStarted | Arguments | CallEnded] = []

    def anew(self) -> "TrailingCalls":
        """The same for other reasoning of the turn."""
        return TrailingCalls(*self._arguments)

    def feed(self, text: str) -> None:
        """The next text of the reasoning."""
        self._tail += text
        while True:
            if self._parser is None:
                at, end = self._marks.find(self._tail, 0)
                self._move(at)
                if end < 0:
                    return
                self._parser = self._make()
            for char in self._tail[self._num_read :]:
                self._num_read += 1
                if not self._are_calls(self._parser.feed(char)):
                    self._move(self._last_tag(self._tail[: self._num_read]))
                    break
            else:
                return

    def finish(self) -> list[CallStarted | Arguments | CallEnded]:
        """The calls at the end of the text, with spans that count from `start`; empty if there are none."""
        if self._parser is None or not self._are_calls(self._parser.finish()):
            return []
        kinds = [type(piece) for piece in self._pieces]
        return self._pieces if kinds.count(CallStarted) == kinds.count(CallEnded) > 0 else []

    def _are_calls(self, pieces: list[Piece]) -> bool:
        """Whether the text is still nothing but calls with these pieces."""
        self._pieces += [piece for piece in pieces if isinstance(piece, CallStarted | Arguments | CallEnded)]
        return not any(
            piece.text.strip()
            if isinstance(piece, Content)
            else isinstance(piece, CallStarted) and self._names is not None and piece.name not in self._names
            for piece in pieces
        )

    def _last_tag(self, text: str) -> int:
        """The offset of the last tag behind the beginning of a text; that of half a tag at its end if there is none."""
        last, end = self._marks.find(text, 1)
        while end >= 0 and (span := self._marks.find(text, end))[1] >= 0:
            last, end = span
        return last

    def _move(self, by: int) -> None:
        self.start += by
        self._tail = self._tail[by:]
        self._parser, self._num_read, self._pieces = None, 0, []
