"""Finds calls in a request's generated tokens: in a model family's format, by stop strings, by a regular expression, by single
tokens, or by a script."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from jinfercept.calls import Call, Tool
from jinfercept.chat.parsers.source import CallParser
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat
from jinfercept.errors import RequestError, shown
from jinfercept.events import CallEnded, Piece
from jinfercept.hooks import Watch


@final
class TokenOwners:
    """The tokens of a text, by its characters."""

    def __init__(self) -> None:
        self._starts, self._tokens = list[int](), list[int]()
        self._num_chars = 0

    def add(self, token: int, num_chars: int) -> None:
        """Add the next token, which has some characters."""
        self._starts.append(self._num_chars)
        self._tokens.append(token)
        self._num_chars += num_chars

    def span(self, first: int, end: int) -> tuple[int, int]:
        """The range of the tokens of a range of characters."""
        owners = [self._tokens[bisect_right(self._starts, char) - 1] for char in (first, end - 1)]
        return owners[0], owners[1] + 1


@final
class ParsedTurn:
    """A turn's parser, its calls so far, and where in the turn's text each token begins.

    Attributes:
        calls: the complete calls, with spans in characters of the turn.
    """

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self.calls: list[Call] = []
        self._owners = TokenOwners()
        self._early: list[Piece] = []
        self._num_early = 0

    def feed(self, index: int, num_chars: int, text: str) -> list[Piece]:
        """The pieces that are certain with the next token.

        Args:
            index: place of the token in the request's `token_ids`.
            num_chars: characters that the token adds to the turn, now or once they are certain.
            text: the text that is certain now.
        """
        self._owners.add(index, num_chars)
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
        return tuple(replace(call, span=self._owners.span(*call.span)) for call in self.calls)

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


@final
class RegexDetector:
    """A call is a match of a pattern, across token borders, complete at the first character at which the pattern matches.

    So the pattern should end with the text that closes a call: `\\d+` alone is complete with its first digit. The group
    `name` is the tool, the group `arguments` its arguments: the whole match where there is no such group. After a call the
    search begins anew: `^` matches at the beginning of the text and behind a call. A match longer than `MAX_ARGUMENT_CHARS` is
    not found. The pattern is tried at every character: one that backtracks a lot slows the engine down.

    Args:
        pattern: as in Python's `re`, compiled or not.
        tool: the called tool, for a pattern without a group `name`.

    Raises:
        RequestError: the pattern is invalid, matches an empty text, or has neither a tool nor a group `name`.
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
        return _RegexWatch(self._pattern, self._tool)


class _RegexWatch:
    """Text since the last call that may still matter, and the token of every character.

    One character more is kept than is searched, so that `^` and `\\b` see that something stands before.
    """

    def __init__(self, pattern: re.Pattern[str], tool: str | None) -> None:
        self._pattern, self._tool = pattern, tool
        self._text, self._origins = "", list[int]()
        self._before = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        searched = len(self._text)
        self._text += text
        self._origins += [index] * len(text)
        for end in range(searched + 1, len(self._text) + 1):
            first = max(self._before, end - MAX_ARGUMENT_CHARS)
            if match := self._pattern.search(self._text, first, end):
                groups = match.groupdict()
                name = self._tool or groups["name"] or ""
                arguments = groups.get("arguments", match[0]) or ""
                call = Call(name, arguments, (self._origins[match.start()], index + 1))
                self._text, self._origins, self._before = "", [], 0
                return (call,)
        excess = len(self._text) - MAX_ARGUMENT_CHARS - 1
        if excess > MAX_ARGUMENT_CHARS:
            self._text, self._origins, self._before = self._text[excess:], self._origins[excess:], 1
        return ()


@final
class TokenDetector:
    """A call is complete with a certain token; its arguments are the text since an opening token, without it.

    Args:
        calls: names of tools by the token that calls them.
        opening: the token behind which arguments begin, the last one counts; where none came, or the text is longer than
            `MAX_ARGUMENT_CHARS`, there are no arguments.

    Raises:
        RequestError: there are no calls, or an id is no token id, or a name is no string.
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
        return _TokenWatch(self._calls, self._opening)


class _TokenWatch:
    """The text since the opening token, if there was one."""

    def __init__(self, calls: Mapping[int, str], opening: int | None) -> None:
        self._calls, self._opening = calls, opening
        self._since: int | None = None
        self._parts: list[str] = []
        self._num_chars = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        if (name := self._calls.get(token_id)) is not None:
            first = index if self._since is None else self._since
            call = Call(name, "".join(self._parts), (first, index + 1))
            self._forget()
            return (call,)
        if token_id == self._opening:
            self._forget()
            self._since = index
        elif self._since is not None:
            self._parts.append(text)
            self._num_chars += len(text)
            if self._num_chars > MAX_ARGUMENT_CHARS:
                self._forget()
        return ()

    def _forget(self) -> None:
        self._since, self._parts, self._num_chars = None, [], 0


@final
class FormatDetector:
    """The calls of one turn are found together, at the end-of-text token that ends it: they run in parallel.

    A turn that is cut off by a length limit calls nothing. The results of calls begin a new turn.
    """

    def __init__(self, format: ToolCallFormat, eos_token_ids: Iterable[int]) -> None:
        self._format, self._eos_token_ids = format, frozenset(eos_token_ids)

    def watch(self) -> Watch:
        return _FormatWatch(self._format, self._eos_token_ids)


class _FormatWatch:
    """Parses the current turn."""

    def __init__(self, format: ToolCallFormat, eos_token_ids: frozenset[int]) -> None:
        self._format, self._eos_token_ids = format, eos_token_ids
        self._turn = ParsedTurn(format.parser())

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        if token_id not in self._eos_token_ids:
            self._turn.feed(index, len(text), text)
            return ()
        self._turn.finish()
        calls = self._turn.spanning_tokens()
        self._turn = ParsedTurn(self._format.parser())
        return calls


MAX_ARGUMENT_CHARS = 8192
"""Limit of a call's arguments; text beyond it is no call."""


@final
class StopStringDetector:
    """A call opens with a tool's `start` text and is complete at its `stop` text, across token borders.

    Args:
        tools: those with a `start`; the earliest opening in the text wins, the longest if two open at the same place.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        listed = list(tools) if isinstance(tools, Iterable) else [tools]
        if not all(isinstance(tool, Tool) for tool in listed):
            raise RequestError(
                "tools must be a list of Tool", got=shown(tools), fix="[Tool(function, start=…, stop=…)]"
            )
        self._marks = [(tool.start, tool.stop, tool.name) for tool in listed if tool.start and tool.stop]

    def watch(self) -> Watch:
        return _StopStringWatch(self._marks)


class _StopStringWatch:
    """Text since the last call that may still matter, and the tokens that it came from."""

    def __init__(self, marks: list[tuple[str, str, str]]) -> None:
        self._marks = marks
        self._keep = max((len(start) for start, _, _ in marks), default=1) - 1
        self._text = ""
        self._origins: list[int] = []  # the token index of every character
        self._open: tuple[str, str, str] | None = None
        self._searched = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        self._text += text
        self._origins += [index] * len(text)
        while True:
            if self._open is None and not self._find_start():
                return ()
            assert self._open is not None
            start, stop, name = self._open
            limit = len(start) + MAX_ARGUMENT_CHARS + len(stop)
            end = self._text.find(stop, max(len(start), self._searched - len(stop) + 1), limit)
            if end >= 0:
                call = Call(name, self._text[len(start) : end], (self._origins[0], index + 1))
                self._text, self._origins, self._open = "", [], None
                return (call,)
            self._searched = len(self._text)
            if len(self._text) < limit:
                return ()
            self._cut(len(start))
            self._open = None

    def _find_start(self) -> bool:
        """Open the call that begins earliest; wait while one that begins no later may still be on its way."""
        text = self._text
        openings = [(at, -len(mark[0]), mark) for mark in self._marks if (at := text.find(mark[0])) >= 0]
        first = max(0, len(text) - self._keep)
        coming = next((at for at in range(first, len(text)) if self._may_begin(text[at:])), len(text))
        if not openings or coming <= min(openings)[0]:
            self._cut(min(coming, min(openings)[0]) if openings else coming)
            return False
        at, _, self._open = min(openings)
        self._cut(at)
        self._searched = 0
        return True

    def _may_begin(self, text: str) -> bool:
        return any(len(text) < len(start) and start.startswith(text) for start, _, _ in self._marks)

    def _cut(self, count: int) -> None:
        self._text, self._origins = self._text[count:], self._origins[count:]


@final
class ScriptedDetector:
    """Calls at fixed places, independent of the tokens: for benchmarks and tests.

    Args:
        script: calls by the number of tokens generated so far; results of tools do not count.
    """

    def __init__(self, script: Mapping[int, Sequence[Call]]) -> None:
        try:
            self.script = {count: tuple(calls) for count, calls in script.items()}
        except (AttributeError, TypeError):
            raise RequestError(
                "a script must map numbers of tokens to lists of calls", got=shown(script), fix="{3: [Call(…)]}"
            ) from None

    def watch(self) -> Watch:
        return _ScriptedWatch(self.script)


class _ScriptedWatch:
    def __init__(self, script: Mapping[int, tuple[Call, ...]]) -> None:
        self._script = script
        self._count = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        self._count += 1
        calls = self._script.get(self._count)
        return tuple([replace(call, span=(index, index + 1)) for call in calls]) if calls else ()
