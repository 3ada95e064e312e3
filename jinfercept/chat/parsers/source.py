"""Text that is still arriving, and the pieces made from it: the `read` functions of formats read and write a `Source`.

Each is a generator (`Steps`) that yields when it needs more text. It reads on from `at`, and may go back as far as the last
piece that it wrote.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from typing import Any, Protocol, final

from jinfercept.calls import Call
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning


class CallParser(Protocol):
    """Reads one turn of one request. The joined pieces do not depend on how the text is divided."""

    def feed(self, text: str) -> list[Piece]:
        """Add the next text, with special tokens by name, and return the pieces that are certain now."""
        ...

    def finish(self, cut: bool = False) -> list[Piece]:
        """End the turn and return its last pieces. If it was `cut` off, text that could have become markup is dropped."""
        ...

    def in_call(self, text: str) -> bool:
        """Whether `text`, coming next, would be part of a call, or white space beside one, and not be shown."""
        ...


type Steps[T] = Generator[None, None, T]
"""Yields whenever it needs more text; after the end of the text it never does."""

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the tools' parameters, by the tools' names."""


@final
class Marks:
    """Searches for any of several texts."""

    def __init__(self, texts: tuple[str, ...], openings: tuple[str, ...] = ()) -> None:
        # tags and ends of turns are never content; openings are content, unless a call begins with them
        self.tags, self.openings = texts, openings
        self._sorted = sorted(texts + openings)
        self._firsts = frozenset(text[:1] for text in self._sorted)
        self._longest = max(map(len, self._sorted), default=1)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tags + self.openings)) or r"(?!)")

    def find(self, text: str, at: int) -> tuple[int, int]:
        """Return start and end of the first mark from `at` on; without one, (the offset where a mark may have begun, -1)."""
        mark = self._pattern.search(text, at)
        return mark.span() if mark else (self.certain(text, at), -1)

    def certain(self, text: str, at: int = 0) -> int:
        """Return the offset from `at` on where a mark may have begun that the text's end cuts off, or the text's length."""
        ends = range(max(at, len(text) - self._longest + 1), len(text))
        return next((start for start in ends if text[start] in self._firsts and self._begins(text[start:])), len(text))

    def _begins(self, text: str) -> bool:
        # not a set of all beginnings: those of a long stop string would have half its length squared in characters
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


@final
class Source:
    """One turn's text, and the `CallParser` that a format's `read` function makes of it.

    White space beside a call is no content: it is held back until text follows, and dropped around a call.
    Formats read the characters of `text` from offset `at` on.
    """

    def __init__(
        self,
        read: "Callable[[Source], Steps[None]]",
        marks: Marks,
        new_id: Callable[[], str],
        ids: str,
        tools: ToolSchemas | None,
        used: set[str] | None,
        *,
        only_calls: bool,
        first_only: bool,
    ) -> None:
        # ids that do not match `ids`, or that an earlier call has (`used`), are replaced; `tools` is None if they are unknown
        self._marks, self._new_id, self._ids, self.tools = marks, new_id, re.compile(ids), tools
        self._only_calls, self._first_only = only_calls, first_only  # calls after the first are read and dropped
        self._used: set[str] = set() if used is None else used
        self._space, self._after_call, self._has_content = "", False, False
        self._in_markup = False
        self._num_calls = 0
        self._cut_chars = 0
        self._open: tuple[str, str, int, list[str]] | None = None
        # ended: no more text comes; cut: the turn was cut off there
        self.text, self.at, self.ended, self.cut = "", 0, False, False
        self._pieces: list[Piece] = []
        self._steps = read(self)
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        return self._advance()

    def finish(self, cut: bool = False) -> list[Piece]:
        self.ended, self.cut = True, cut
        pieces = self._advance()
        assert self.at == len(self.text), "the format leaves text unread"
        if cut:
            return [piece for piece in pieces if not isinstance(piece, Content)]
        if self._space and not self._after_call:  # white space that was held back for a call
            pieces.append(Content(self._space))
        return pieces

    def in_call(self, text: str) -> bool:
        half = self.text[self.at :]
        completes_tag = half != "" and any(
            tag.startswith(half) and (half + text).startswith(tag) for tag in self._marks.tags
        )
        in_markup = self._only_calls or self._in_markup or self._open is not None
        return in_markup or completes_tag or (self._after_call and text.isspace())

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        if self._first_only:
            pieces = [piece for piece in pieces if isinstance(piece, Content | Reasoning) or piece.index == 0]
        return pieces

    # -- reading ---------------------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip(self, chars: str = " \t\r\n") -> Steps[str]:
        """Pass over some characters, and return the first other one; "" at the end."""
        while (char := (yield from self.peek())) and char in chars:
            self.at += 1
        return char

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Pass over the longest run of characters that each match a pattern, and return it."""
        start = self.at
        while (char := (yield from self.peek())) and pattern.match(char):
            self.at += 1
        return self.text[start : self.at]

    def take(self, *options: str) -> Steps[str]:
        """Pass over whichever of these texts comes next, and return it; "" if none does."""
        while not (option := next((text for text in options if self.text.startswith(text, self.at)), "")):
            rest = self.text[self.at :]
            if self.ended or not any(text.startswith(rest) for text in options):
                return ""
            yield
        self.at += len(option)
        return option

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def begins_line(self) -> bool:
        """Whether content written here would begin a line, or the turn."""
        return "\n" in self._space or self._after_call or not self._has_content

    def read_content(self) -> Steps[str]:
        """Write the text up to the next mark as content, and return the mark; "" at the end. An opening is not passed over."""
        self._in_markup = False
        while True:
            start, end = self._marks.find(self.text, self.at)
            if end < 0 and self.ended:
                start = len(self.text)
            self._write_content(self.text[self.at : start])
            mark = self.text[start : max(start, end)]
            self.at = start if mark in self._marks.openings else max(start, end)
            self._cut()
            if mark or self.ended:
                self._in_markup = mark in self._marks.tags
                return mark
            yield

    def add_content(self, length: int) -> None:
        """Write the next `length` characters as content."""
        self._write_content(self.text[self.at : self.at + length])
        self.at += length
        self._cut()

    def begin_paragraph(self) -> None:
        """Separate the following content from earlier content by a blank line, unless a call comes first."""
        if self._has_content and not self._after_call:
            self._space = "\n\n"

    def skip_until(self, marks: Marks) -> Steps[str]:
        """Pass over the text up to the next mark, stay before it, and return it; "" at the end."""
        while True:
            self.at, end = marks.find(self.text, self.at)
            if end >= 0:
                return self.text[self.at : end]
            if self.ended:
                self.at = len(self.text)
                return ""
            yield

    def begin_call(self, name: str, start: int, call_id: str = "") -> None:
        """Begin a call whose first character is at `start`."""
        assert self._open is None, "a call within a call"
        if not self._ids.fullmatch(call_id) or call_id in self._used:
            call_id = self._new_id()
        self._used.add(call_id)
        self._open = (name, call_id, self._cut_chars + start, [])
        self._space, self._after_call = "", True
        self._pieces.append(CallStarted(self._num_calls, name, call_id))

    def add_arguments(self, text: str) -> None:
        """Write the next part of the open call's arguments. The text up to `at` cannot be read again."""
        assert self._open is not None
        if text:
            self._open[3].append(text)
            self._pieces.append(Arguments(self._num_calls, text))
        self._cut()

    def end_call(self) -> None:
        """Complete the open call, to which the text before `at` belongs."""
        assert self._open is not None
        name, call_id, start, arguments = self._open
        call = Call(name, "".join(arguments), (start, self._cut_chars + self.at), id=call_id)
        self._pieces.append(CallEnded(self._num_calls, call))
        self._num_calls += 1
        self._open = None
        self._cut()

    def write_call(self, name: str, start: int, arguments: str, call_id: str = "") -> None:
        """Write a whole call from `start` up to `at`."""
        self.begin_call(name, start, call_id)
        self.add_arguments(arguments)
        self.end_call()

    def drop_rest(self) -> None:
        """Drop the rest of the text, a call that was cut off."""
        self._space, self.at = "", len(self.text)

    def leave(self, start: int) -> None:
        """Go back to `start`, because the text is no call. If the text ends with it, drop it."""
        if self.ended and self.at == len(self.text):
            self.drop_rest()
        else:
            self.at = start

    def _write_content(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._has_content = True
            self._pieces.append(Content(stripped))

    def _cut(self) -> None:
        self._cut_chars += self.at
        self.text, self.at = self.text[self.at :], 0
