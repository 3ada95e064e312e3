"""Granite, Nemotron, Command R, Apriel, MiniMax M1, GigaChat, Firefunction: JSON objects behind a tag of their own.

`CallLists` is one family's way of writing them; the families differ in tags, in keys, and in how objects follow each other.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Marks, Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_ASIDE_END = Marks((">",))


@final
@dataclass(frozen=True, slots=True)
class CallLists:
    """How one family writes such calls.

    Attributes:
        opening, closing: the tags around all calls of a turn; `closing` may be empty.
        before, between, behind: texts around the objects; `between` is None where there is one call a turn.
        name, arguments: the keys of an object.
        members: an expression for the members that stand before them.
        readable: other tags behind which calls are read.
        aside: a tag up to the next `>`, with what stands between: never content.
        fence: text that may stand behind the objects and is no tag.
    """

    opening: str
    closing: str
    before: str = "["
    between: str | None = ", "
    behind: str = "]"
    name: str = "name"
    arguments: str = "arguments"
    members: str = ""
    readable: tuple[str, ...] = ()
    aside: str = ""
    fence: str = ""

    def read(self, source: Source) -> Steps[None]:
        """Read a turn. The closing tag may be missing; objects may be in a list or not. `read_calls` says the rest."""
        while mark := (yield from source.read_content()):
            if mark in (self.opening, *self.readable):
                if (yield from read_calls(source, tagged=True)) and self.fence:
                    yield from source.take(self.fence)
            elif mark == self.aside and (yield from source.skip_until(_ASIDE_END)):
                source.at += 1

    def grammar(self, calls: CallGrammar) -> str:
        """The grammar of a turn that has to call."""
        call = calls.objects(self.arguments, self.name, self.members)
        body = call if self.between is None else calls.several(call, quoted(self.between))
        parts = (calls.tag(self.opening), _text(self.before), body, _text(self.behind + self.fence))
        return " ".join((*parts, *([calls.tag(self.closing)] if self.closing else ())))

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls of an earlier turn."""
        objects = [json.dumps({self.name: name, self.arguments: values}, ensure_ascii=False) for name, values in calls]
        listed = (self.between or "").join(objects)
        return f"{self.opening}{self.before}{listed}{self.behind}{self.fence}{self.closing}"

    def format(
        self,
        detect: Callable[[str], bool],
        turn_ends: tuple[str, ...],
        tags: tuple[str, ...] = (),
        frames_text: bool = False,
    ) -> ToolCallFormat:
        """The format of the family.

        Args:
            tags: more markup than that of calls.
        """
        own = (self.opening, *filter(None, (self.closing, self.aside)), *self.readable)
        return ToolCallFormat(
            read=self.read,
            grammar=self.grammar,
            detect=detect,
            tags=(*own, *tags),
            turn_ends=turn_ends,
            frames_text=frames_text,
            write=self.write,
        )


def _text(text: str) -> str:
    return quoted(text) if text else ""


GRANITE = CallLists("<|tool_call|>", "", readable=("<tool_call>",)).format(
    lambda template: "<|tool_call|>" in template and "<|start_of_role|>" in template, ("<|end_of_text|>",)
)
NEMOTRON = CallLists("<TOOLCALL>", "</TOOLCALL>").format(
    lambda template: "<TOOLCALL>" in template, ("<SPECIAL_12>", "</s>")
)
APRIEL = CallLists("<tool_calls>", "</tool_calls>").format(
    lambda template: "<tool_calls>[" in template, ("<|end|>",), tags=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")
)
MINIMAX = CallLists("<tool_calls>", "</tool_calls>", "\n", "\n", "\n").format(
    lambda template: '<tool_calls>\n{"name"' in template.replace("\\n", "\n"), ("<end_of_sentence>",)
)
COHERE = CallLists(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name="tool_name",
    arguments="parameters",
    members='"\\"tool_call_id\\": \\"" /[0-9]{1,3}/ "\\", "',
    aside="</co:",
).format(
    lambda template: "<|START_ACTION|>" in template,
    ("<|END_OF_TURN_TOKEN|>",),
    tags=("<co>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    frames_text=True,
)
COMMAND_R = CallLists(
    "Action:\n```json",
    "",
    "\n[\n    ",
    ",\n    ",
    "\n]",
    "tool_name",
    "parameters",
    readable=("Action: ```json", "Action:```json"),
    fence="```",
).format(lambda template: "Action:\n```json" in template.replace("\\n", "\n"), ("<|END_OF_TURN_TOKEN|>",))
GIGACHAT = CallLists("<|function_call|>", "", "", None, "", readable=("function call<|role_sep|>",)).format(
    lambda template: "<|role_sep|>" in template and "function call" in template, ("</s>",), tags=("<|message_sep|>",)
)
FIREFUNCTION = CallLists("functools[", "", "").format(lambda template: "functools[" in template, ("<|eot_id|>",))
