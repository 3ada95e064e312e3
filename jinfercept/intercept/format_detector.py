"""Finds calls in the format of a model family: all calls of a turn at its end. Knows no engine."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, final

from jinfercept.events import CallEnded, Piece
from jinfercept.parsers.pieces import CallParser
from jinfercept.request import Call, Watch


class ParserFactory(Protocol):
    """Makes a parser for every turn, in order; a `ToolCallFormat` is one."""

    def parser(self) -> CallParser: ...


@final
class FormatDetector:
    """The calls of one turn are found together, at the end-of-text token that ends it: they run in parallel.

    A turn that is cut off by a length limit calls nothing. The results of calls begin a new turn.

    Args:
        format: a format of `parsers.formats.FORMATS`.
        eos_token_ids: the tokens that end a turn.
    """

    def __init__(self, format: ParserFactory, eos_token_ids: Iterable[int]) -> None:
        self._format, self._eos_token_ids = format, frozenset(eos_token_ids)

    def watch(self) -> Watch:
        return _FormatWatch(self._format, self._eos_token_ids)


class _FormatWatch:
    """The turn's parser, its calls so far, and where in the turn's text each token begins."""

    def __init__(self, format: ParserFactory, eos_token_ids: frozenset[int]) -> None:
        self._format, self._eos_token_ids = format, eos_token_ids
        self._begin_turn()

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        if token_id not in self._eos_token_ids:
            self._starts.append(self._length)
            self._tokens.append(index)
            self._length += len(text)
            self._take(self._parser.feed(text))
            return ()
        self._take(self._parser.finish())
        calls = tuple(replace(call, span=self._tokens_of(*call.span)) for call in self._calls)
        self._begin_turn()
        return calls

    def _begin_turn(self) -> None:
        self._parser: CallParser = self._format.parser()
        self._calls: list[Call] = []
        self._starts: list[int] = []
        self._tokens: list[int] = []
        self._length = 0

    def _take(self, pieces: list[Piece]) -> None:
        self._calls += [piece.call for piece in pieces if isinstance(piece, CallEnded)]

    def _tokens_of(self, first: int, end: int) -> tuple[int, int]:
        """Characters of the turn to tokens of the request."""
        owners = [self._tokens[bisect_right(self._starts, char) - 1] for char in (first, end - 1)]
        return owners[0], owners[1] + 1
