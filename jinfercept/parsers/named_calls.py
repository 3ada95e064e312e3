"""Calls whose name stands in markup, before their arguments as one JSON object: `<call>name<arguments>{…}</call>`.

`NamedCalls` is one family's way of writing them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.json_values import stream_call
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Source, Steps

NAME_CHAR = re.compile(r"[\w.:/-]")
NAME = re.compile(r"[\w.:/-]+")
_SPACE = " \t\r\n"


class Head(NamedTuple):
    """The part of a call before its arguments.

    Attributes:
        start: the offset of the call's first character.
        call_id: empty if the model wrote none.
    """

    name: str
    start: int
    call_id: str = ""


@final
@dataclass(frozen=True, slots=True)
class NamedCalls:
    """How one family writes such calls.

    Attributes:
        opening, closing: the tags around a call.
        read_head: reads what stands between the opening tag and the arguments; None: it is no call.
        write_head: the expression for it, for a tool's name.
        sections: the pairs of tags around all calls of a turn; the first is written, all are read.
        fence: text that may stand behind the arguments.
        between: text that stands between two calls.
    """

    opening: str
    closing: str
    read_head: Callable[[Source], Steps[Head | None]]
    write_head: Callable[[CallGrammar, str], str]
    sections: tuple[tuple[str, str], ...] = ()
    fence: str = ""
    between: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return (
            self.opening,
            *([self.closing] if self.closing else ()),
            *(tag for pair in self.sections for tag in pair),
        )

    def read(self, source: Source) -> Steps[None]:
        """Read a turn.

        A call begins with the `{` of its arguments, or with the tag that closes it where they are missing. Text behind the
        opening tag that is no call is content, or dropped where the turn ends with it. Closing tags may be missing.
        """
        while mark := (yield from source.read_content()):
            if mark == self.opening:
                yield from self._read_call(source)

    def _read_call(self, source: Source) -> Steps[None]:
        start = source.at
        yield from source.skip()
        head = yield from self.read_head(source)
        char = yield from source.skip()
        if head is not None and char == "{":
            yield from stream_call(source, *head, behind=_SPACE + "}")
            if self.fence:
                yield from source.take(self.fence)
        elif head is not None and self.closing and (yield from source.take(self.closing)):
            source.write_call(head.name, head.start, "{}", head.call_id)
        else:
            source.leave(start)

    def grammar(self, calls: CallGrammar) -> str:
        """The grammar of a turn that has to call."""

        def write(name: str, schema: Mapping[str, Any]) -> str:
            fence = quoted(f"\n{self.fence}") if self.fence else ""
            closing = calls.tag(self.closing) if self.closing else ""
            return f"{calls.tag(self.opening)} {self.write_head(calls, name)} {calls.arguments(name, schema)} {fence} {closing}"

        body = calls.several(calls.each(write, NAME), quoted(self.between) if self.between else "")
        if not self.sections:
            return body
        first, last = self.sections[0]
        return f"{calls.tag(first)} {body} {calls.tag(last)}"
