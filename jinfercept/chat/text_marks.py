"""Marks in the messages of a chat: names of special tokens in them stay apart from those that the template writes."""

import json
import re
import secrets
from functools import cached_property
from itertools import accumulate
from typing import Any, final

from jinfercept.chat.messages import WRITTEN_CALLS
from jinfercept.errors import RequestError
from jinfercept.parsers.reasoning import REASONING_FORMATS
from jinfercept.tokenizer.special_token_names import SpecialTokenNames

_REASONING = frozenset(tag for form in REASONING_FORMATS.values() for tag in (form.opening, form.closing))


class Rendered(str):
    """A conversation's text.

    Attributes:
        breaks: offsets within or beside names of special tokens that are given text, not the template's.
    """

    breaks: tuple[int, ...]

    def __new__(cls, text: str, breaks: tuple[int, ...] = ()) -> "Rendered":
        rendered = super().__new__(cls, text)
        rendered.breaks = breaks
        return rendered


@final
class TextMarks:
    """Puts a mark into each name of a special token in a text, and finds the marks again in what a template writes.

    Args:
        in_text: the names stand for their tokens, so that nothing is marked.
    """

    def __init__(self, names: SpecialTokenNames, in_text: bool) -> None:
        self._names, self._special_tokens_in_text = names, in_text
        self._mark, self._is_marked = chr(0xF0000 + secrets.randbelow(0xFFFE)), False  # one of those for private use

    def given_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with marks. An assistant's content keeps the tags of reasoning, for the template to find, and of calls."""
        names = self._names
        if names.but(_REASONING) is names and not any(message.get(WRITTEN_CALLS) for message in messages):
            return [*map(self.given, messages)]
        marked_messages = list[dict[str, Any]]()
        for message in messages:
            marked = self.given(message)
            if message["role"] == "assistant":
                content = self.given(message["content"], _REASONING) + message.get(WRITTEN_CALLS, "")
                marked = marked if content is marked["content"] else marked | {"content": content}
            marked_messages.append(marked)
        return marked_messages

    def given[T](self, value: T, but: frozenset[str] = frozenset()) -> T:
        """A value whose texts have marks, except in the names `but`."""
        return value if self._special_tokens_in_text else self.with_marks(value, but)

    def with_marks[T](self, value: T, but: frozenset[str] = frozenset()) -> T:
        """As `given`, whatever `in_text` says."""
        try:
            marked = self._names.but(but).marked(value, self._mark)
        except RecursionError as error:
            raise RequestError(
                "messages, tools and chat_template_kwargs are nested too deeply",
                got=type(value).__name__,
                fix="flatten them",
            ) from error
        if marked is not value:  # one store: several threads may do it
            self._is_marked = True
        return marked

    @cached_property
    def _escaped_marks(self) -> tuple[str, ...]:
        return json.dumps(self._mark)[1:-1], repr(self._mark)[1:-1]

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join([self._mark, *map(re.escape, self._escaped_marks)]))

    def unmarked(self, text: str) -> str:
        """A text without its marks, escaped ones too."""
        return self._marks.sub("", text) if self._is_marked else text

    def rendered(self, marked: str) -> "Rendered":
        """A text without its marks."""
        if not self._is_marked:
            return Rendered(marked)
        pieces = (
            self._marks.split(marked)
            if any(escaped in marked for escaped in self._escaped_marks)
            else marked.split(self._mark)
        )
        return Rendered("".join(pieces), tuple(accumulate(map(len, pieces[:-1]))))
