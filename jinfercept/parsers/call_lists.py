"""Granite, Nemotron, Apriel, Firefunction: a list of JSON objects behind a tag of their own.

`CallLists` is one family's way of writing them; the families differ in tags, and in what stands around the objects.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat


@final
@dataclass(frozen=True, slots=True)
class CallLists:
    """How one family writes such calls.

    Attributes:
        opening, closing: the tags around the list; `closing` may be empty.
        bracket: the opening of the list; empty where the tag has it.
        readable: other tags behind which calls are read.
    """

    opening: str
    closing: str
    bracket: str = "["
    readable: tuple[str, ...] = ()

    def read(self, source: Source) -> Steps[None]:
        """Read a turn. The closing tag may be missing; objects may be in a list or not. `read_calls` says the rest."""
        while mark := (yield from source.read_content()):
            if mark in (self.opening, *self.readable):
                yield from read_calls(source, tagged=True)

    def grammar(self, calls: CallGrammar) -> str:
        """The grammar of a turn that has to call."""
        objects = calls.several(calls.objects("arguments"), '", "')
        return f'{calls.tag(self.opening)} {quoted(self.bracket)} {objects} "]" {calls.tag(self.closing)}'

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls of an earlier turn."""
        objects = [json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls]
        return f"{self.opening}{self.bracket}{', '.join(objects)}]{self.closing}"

    def format(
        self, detect: Callable[[str], bool], turn_ends: tuple[str, ...], tags: tuple[str, ...] = ()
    ) -> ToolCallFormat:
        """The format of the family.

        Args:
            tags: more markup than that of calls.
        """
        return ToolCallFormat(
            read=self.read,
            grammar=self.grammar,
            detect=detect,
            tags=(self.opening, *([self.closing] if self.closing else ()), *self.readable, *tags),
            turn_ends=turn_ends,
            write=self.write,
        )


GRANITE = CallLists("<|tool_call|>", "", readable=("<tool_call>",)).format(
    lambda template: "<|tool_call|>" in template and "<|start_of_role|>" in template, ("<|end_of_text|>",)
)
NEMOTRON = CallLists("<TOOLCALL>", "</TOOLCALL>").format(
    lambda template: "<TOOLCALL>" in template, ("<SPECIAL_12>", "</s>")
)
APRIEL = CallLists("<tool_calls>", "</tool_calls>").format(
    lambda template: "<tool_calls>[" in template, ("<|end|>",), tags=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")
)
FIREFUNCTION = CallLists("functools[", "", bracket="").format(
    lambda template: "functools[" in template, ("<|eot_id|>",)
)
