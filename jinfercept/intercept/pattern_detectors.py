"""Finds calls by a regular expression or by single tokens, for models with a call syntax of their own."""

import re
from collections.abc import Mapping
from typing import final

from jinfercept.calls import Call
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import Watch
from jinfercept.intercept.detector import MAX_ARGUMENT_CHARS


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
