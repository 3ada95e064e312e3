"""Finds calls in a request's generated tokens: by format, stop string, regular expression, token or script."""

import re
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import final

from jinfercept.calls import Call, Tool
from jinfercept.chat.parsers.source import CallParser, Marks
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat
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
        self._early: list[Piece] = []
        self._num_early = 0

    def feed(self, index: int, num_chars: int, text: str) -> list[Piece]:
        """Read the next token, and return the pieces that it makes certain.

        Args:
            index: place of the token in the request's `token_ids`.
            num_chars: characters that the token adds to the turn, now or once they are certain.
            text: the text that is certain now.
        """
        self._owners.add(index, num_chars)
        return self._read(text)

    def finish(self, text: str = "", cut: bool = False) -> list[Piece]:
        """End the turn, and return its last pieces.

        Args:
            text: the rest of the turn's text.
            cut: see `CallParser.finish`.
        """
        return self._read(text) + self._noted(self._parser.finish(cut))

    def in_call(self, before: str, text: str) -> bool:
        """Whether `text` is part of a call, or white space beside a call.

        The certain text `before` it, with which the next `feed` or `finish` begins, is read now.
        """
        self._early += self._noted(self._parser.feed(before[self._num_early :]))
        self._num_early = max(self._num_early, len(before))
        return self._parser.in_call(text)

    def spanning_tokens(self) -> tuple[Call, ...]:
        """Return the calls with spans in tokens of the request."""
        return tuple(replace(call, span=self._owners.span(*call.span)) for call in self.calls)

    def _read(self, text: str) -> list[Piece]:
        early, self._early = self._early, []
        # `in_call` has read this part already
        text, self._num_early = text[self._num_early :], 0
        return early + (self._noted(self._parser.feed(text)) if text else [])

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallEnded):
                self.calls.append(piece.call)
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


@final
class RegexDetector:
    r"""Finds calls as matches of a pattern, across token borders. A call is complete at the first character that makes a match.

    The pattern should therefore end with the text that closes a call: `\d+` alone is complete with its first digit. The group
    `name` is the tool, and the group `arguments` its arguments; without this group the whole match is the arguments. After a
    call the search begins anew: `^` matches at the beginning of the text and after a call. A match longer than
    `MAX_ARGUMENT_CHARS` is not found. The pattern is tried at every character, so one that backtracks a lot slows the engine
    down. Raises `RequestError` if the pattern is invalid, matches an empty text, or has neither a tool nor a group `name`.

    Args:
        pattern: as in Python's `re`, compiled or not.
        tool: the called tool, for a pattern without a group `name`.
    """

    def __init__(self, pattern: str | re.Pattern[str], tool: str | None = None) -> None:
        try:
            self._pattern = re.compile(pattern)
            matches_nothing = self._pattern.search("")
        except (re.error, TypeError) as error:
            raise RequestError("the pattern is not a regular expression", got=shown(pattern), fix=str(error)) from None
        if matches_nothing:
            raise RequestError("the pattern matches an empty text", got=shown(pattern), fix="let it need a character")
        if tool is None and "name" not in self._pattern.groupindex:
            raise RequestError(
                "the pattern does not say what is called",
                got=shown(pattern),
                fix="name the tool, or a group (?P<name>…)",
            )
        self._tool = tool

    def watch(self) -> Watch:
        return _Watch(self._find())

    def _find(self) -> _Search:
        # one character more is kept than is searched, so that `^` and `\b` see that something stands before
        text, origins, before = "", list[int](), 0  # since the last call, and the token of each of its characters
        calls: tuple[Call, ...] = ()
        while True:
            index, _, added = yield calls
            calls, searched = (), len(text)
            text += added
            origins += [index] * len(added)
            for end in range(searched + 1, len(text) + 1):
                if match := self._pattern.search(text, max(before, end - MAX_ARGUMENT_CHARS), end):
                    groups = match.groupdict()
                    arguments = groups.get("arguments", match[0]) or ""
                    span = (origins[match.start()], index + 1)
                    calls = (Call(self._tool or groups["name"] or "", arguments, span),)
                    text, origins, before = "", [], 0
                    break
            excess = len(text) - MAX_ARGUMENT_CHARS - 1
            if excess > MAX_ARGUMENT_CHARS:
                text, origins, before = text[excess:], origins[excess:], 1


@final
class TokenDetector:
    """Finds calls by single tokens: one completes the call, and its arguments are the text since an opening token.

    Raises `RequestError` if there are no calls, an id is no token id, or a name is no string.

    Args:
        calls: names of tools by the token that calls them.
        opening: arguments begin after the last token with this id. Without such a token, or if the text is longer than
            `MAX_ARGUMENT_CHARS`, a call has no arguments.
    """

    def __init__(self, calls: Mapping[int, str], opening: int | None = None) -> None:
        named = calls if isinstance(calls, Mapping) else {}
        tokens = (*named, *(() if opening is None else (opening,)))
        wrong = [token for token in tokens if type(token) is not int or token < 0]
        wrong += [name for name in named.values() if not isinstance(name, str)]
        if wrong or not named:
            raise RequestError(
                "calls must map token ids to tools", got=shown(wrong or calls), fix="give names of tools by token id"
            )
        self._calls, self._opening = dict(calls), opening

    def watch(self) -> Watch:
        return _Watch(self._find())

    def _find(self) -> _Search:
        since: int | None = None
        parts, num_chars = list[str](), 0  # since the opening token
        calls: tuple[Call, ...] = ()
        while True:
            index, token_id, text = yield calls
            calls = ()
            if (name := self._calls.get(token_id)) is not None:
                calls = (Call(name, "".join(parts), (index if since is None else since, index + 1)),)
                since = None
            elif token_id == self._opening:
                since = index
            elif since is not None and num_chars + len(text) <= MAX_ARGUMENT_CHARS:
                parts.append(text)
                num_chars += len(text)
                continue
            else:
                since = None
            parts, num_chars = [], 0


@final
class FormatDetector:
    """Finds the calls of one turn together, at the end-of-text token that ends it. They run in parallel.

    A turn that is cut off by a length limit calls nothing. The results of calls begin a new turn.
    """

    def __init__(self, format: ToolCallFormat, eos_token_ids: Iterable[int]) -> None:
        self._format, self._eos_token_ids = format, frozenset(eos_token_ids)

    def watch(self) -> Watch:
        return _Watch(self._find())

    def _find(self) -> _Search:
        turn = ParsedTurn(self._format.parser())
        calls: tuple[Call, ...] = ()
        while True:
            index, token_id, text = yield calls
            calls = ()
            if token_id in self._eos_token_ids:
                turn.finish()
                calls, turn = turn.spanning_tokens(), ParsedTurn(self._format.parser())
            else:
                turn.feed(index, len(text), text)


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
