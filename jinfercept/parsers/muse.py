"""Muse: MiniMax M2's tags with `atem:` in them, each call in a message of its own, ` to=name<|message|>…<|eom|>`.

The first message's `<|start|>assistant` stands in the prompt. Reasoning, in a message to `self`, is a reasoning format's.
"""

import re
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Marks, Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.xml_calls import XmlTags, read_xml_call
from jinfercept.parsers.xml_grammar import XML_NAME, named_call

_START, _MESSAGE, _MESSAGE_END, _TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_NEXT = f"{_MESSAGE_END}{_START}assistant"
_RECIPIENT_CHAR = re.compile(r'[^<>\n"]')
_MESSAGE_ENDS = Marks((_MESSAGE_END, _TURN_END, _START))
_TAGS = XmlTags(
    *('<atem:invoke name="', '">', "</atem:invoke>"),
    *('<atem:parameter name="', {'">': ""}, "</atem:parameter>"),
    outer=("<atem:function_calls>", "</atem:function_calls>"),
)


def _read(source: Source) -> Steps[None]:
    """Read a turn. Reasoning behind its first message is dropped; that before is content if no reasoning format took it."""
    yield from _skip_header(source)
    while mark := (yield from source.read_content()):
        if mark == _TAGS.function:
            yield from read_xml_call(source, _TAGS)
        elif mark == _START:
            yield from source.take("assistant")
            if (yield from _skip_header(source)) == "self":
                yield from source.skip_until(_MESSAGE_ENDS)
            else:
                source.begin_paragraph()


def _skip_header(source: Source) -> Steps[str]:
    """Pass over a message's recipient; returns it, "" if none stands here."""
    start = source.at
    yield from source.skip()
    if (yield from source.take("to=")):
        recipient = yield from source.match(_RECIPIENT_CHAR)
        if (yield from source.take(_MESSAGE)):
            return recipient
    source.at = start
    return ""


def _grammar(calls: CallGrammar) -> str:
    opening, closing = map(calls.tag, _TAGS.outer)

    def write(name: str, schema: Mapping[str, Any]) -> str:
        head = f'{quoted(f" to={name}")} {calls.tag(_MESSAGE)} {opening} "\\n" {calls.tag(_TAGS.function)}'
        return f'{head} {named_call(calls, _TAGS, name, schema)} "\\n" {closing}'

    following = calls.tag(_NEXT, (_MESSAGE_END, _START))
    return f"({calls.tag(_START)} {quoted('assistant')})? {calls.several(calls.each(write, XML_NAME), following)}"


MUSE = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: "<atem:invoke" in template,
    tags=(*_TAGS.tags, _START, _MESSAGE, _MESSAGE_END),
    turn_ends=(_TURN_END,),
    frames_text=True,
)
