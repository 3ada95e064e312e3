"""Finds calls in a request's generated tokens: by format, stop string or script."""

from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import final

from jinfercept.calls import Call, Tool
from jinfercept.chat.parsers.source import CallParser, Marks
from jinfercept.errors import RequestError, shown
from jinfercept.events import CallEnded, Piece
from jinfercept.hooks import Watch


@final
class TokenOwners:
    """Maps the characters of a text to its tokens."""

    def __init__(self) -> None:
        self._starts, self._tokens = list[int](), list[int]()
        self._num_chars = 0

    def add(self, token: int, num_chars: int) -> None:
        """Add the next token, which has `num_chars` characters."""
        self._starts.append(self._num_chars)
        self._tokens.append(token)
        self._num_chars += num_chars

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of tokens that have a range of characters."""
        owners = [self._tokens[bisect_right(self._starts, char) - 1] for char in (first, end - 1)]
        return owners[0], owners[1] + 1


@final
class ParsedTurn:
    """A turn's parser, its calls so far, and where in the turn's text each token begins."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self.calls: list[Call] = []  # complete, with spans in characters of the turn
        self._owners = TokenOwners()

    def feed(self, index: int, num_chars: int, text: str) -> list[Piece]:
        """Read the next token, and return the pieces that it makes certain.

        Args:
            index: place of the token in the request's `token_ids`.
            num_chars: characters that the token adds to the turn, now or once they are certain.
            text: the text that is certain now.
        """
        self._owners.add(index, num_chars)
        return self._noted(self._parser.feed(text)) if text else []

    def finish(self, text: str = "", cut: bool = False) -> list[Piece]:
        """End the turn, and return its last pieces.

        Args:
            text: the rest of the turn's text.
            cut: see `CallParser.finish`.
        """
        return self._noted(self._parser.feed(text) + self._parser.finish(cut))

    def spanning_tokens(self) -> tuple[Call, ...]:
        """Return the calls with spans in tokens of the request."""
        return tuple(replace(call, span=self._owners.span(*call.span)) for call in self.calls)

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self.calls += [piece.call for piece in pieces if isinstance(piece, CallEnded)]
        return pieces


type _Search = Generator[tuple[Call, ...], tuple[int, int, str], None]
"""Is sent the arguments of `Watch.feed`, and yields what that returns."""


@final
class _Watch:
    def __init__(self, search: _Search) -> None:
        self._search = search
        next(search)

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        return self._search.send((index, token_id, text))


MAX_ARGUMENT_CHARS = 8192
"""Limit of a call's arguments; text beyond it is no call."""


@final
class StopStringDetector:
    """Finds calls by text, across token borders: a tool's `start` opens a call, and its `stop` completes it.

    Args:
        tools: tools without a `start` are ignored. The earliest opening in the text wins; of two at the same place, the
            longest.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        listed = list(tools) if isinstance(tools, Iterable) else [tools]
        if not all(isinstance(tool, Tool) for tool in listed):
            raise RequestError(
                "tools must be a list of Tool", got=shown(tools), fix="[Tool(function, start=…, stop=…)]"
            )
        self._marks = [(tool.start, tool.stop, tool.name) for tool in listed if tool.start and tool.stop]
        self._starts = Marks(tuple(start for start, _, _ in self._marks))

    def watch(self) -> Watch:
        return _Watch(self._find())

    def _find(self) -> _Search:
        text, origins = "", list[int]()  # what may still matter, and the token of each of its characters
        mark: tuple[str, str, str] | None = None  # of the open call, with which the text begins
        searched = 0
        calls: tuple[Call, ...] = ()
        while True:
            index, _, added = yield calls
            calls = ()
            text += added
            origins += [index] * len(added)
            while not calls:
                if mark is None:
                    first, mark = self._opening(text)
                    text, origins, searched = text[first:], origins[first:], 0
                    if mark is None:
                        break
                start, stop, name = mark
                limit = len(start) + MAX_ARGUMENT_CHARS + len(stop)
                end = text.find(stop, max(len(start), searched - len(stop) + 1), limit)
                searched = len(text)
                if end >= 0:
                    calls = (Call(name, text[len(start) : end], (origins[0], index + 1)),)
                    text, origins, mark = "", [], None
                elif len(text) < limit:
                    break
                else:
                    text, origins, mark = text[len(start) :], origins[len(start) :], None

    def _opening(self, text: str) -> tuple[int, tuple[str, str, str] | None]:
        openings = [(at, -len(mark[0]), mark) for mark in self._marks if (at := text.find(mark[0])) >= 0]
        coming = self._starts.certain(text)
        at, _, mark = min(openings, default=(len(text), 0, None))
        # while an opening that begins no later may be on its way, no mark is certain
        return (coming, None) if coming <= at else (at, mark)


@final
class ScriptedDetector:
    """Makes calls at fixed places, whatever the tokens are. For benchmarks and tests.

    Args:
        script: calls by the number of tokens generated so far, not counting results of tools.
    """

    def __init__(self, script: Mapping[int, Sequence[Call]]) -> None:
        try:
            self.script = {number: tuple(calls) for number, calls in script.items()}
        except (AttributeError, TypeError):
            raise RequestError(
                "a script must map numbers of tokens to lists of calls", got=shown(script), fix="{3: [Call(…)]}"
            ) from None

    def watch(self) -> Watch:
        return _Watch(self._find())

    def _find(self) -> _Search:
        calls: tuple[Call, ...] = ()
        for number in count(1):
            index, _, _ = yield calls
            calls = tuple([replace(call, span=(index, index + 1)) for call in self.script.get(number, ())])
