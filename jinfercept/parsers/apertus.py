"""Apertus: `<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>`, objects whose only key is the tool's name."""

import json
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.call_grammars import JSON_NAME, CallGrammar
from jinfercept.parsers.json_values import Broken, TextEnded, read_short_string, stream_call
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_OPENING, _CLOSING = "<|tools_prefix|>", "<|tools_suffix|>"


def _read(source: Source) -> Steps[None]:
    """Read a turn. What stands behind the tag and is no call is content, or dropped where the turn ends with it."""
    while mark := (yield from source.read_content()):
        if mark != _OPENING:
            continue
        begun = False
        while (yield from _read_call(source, "[{, \t\r\n" if not begun else "]{}, \t\r\n")):
            begun = True


def _read_call(source: Source, between: str) -> Steps[bool]:
    """Read the next call; returns whether there was one, and leaves what is none."""
    start, name = source.at, ""
    char = yield from source.skip(between)
    first = source.at
    if char == '"':
        try:
            name = yield from read_short_string(source)
            if name and (yield from source.skip()) == ":":
                source.at += 1
                char = yield from source.skip()
        except Broken:
            name = ""
        except TextEnded:
            source.drop_rest()
            return False
    if name and char == "{":
        yield from stream_call(source, name, first + 1, behind="]} \t\r\n")
        return True
    source.leave(start)
    return False


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        key = json.dumps(name, ensure_ascii=False)
        return f"{quoted(f'{{{key}: ')} {calls.arguments(name, schema)} {quoted('}')}"

    objects = calls.several(calls.each(write, JSON_NAME), quoted(", "))
    return f'{calls.tag(_OPENING)} "[" {objects} "]" {calls.tag(_CLOSING)}'


APERTUS = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _OPENING in template,
    tags=(_OPENING, _CLOSING),
    turn_ends=("<|assistant_end|>",),
)
