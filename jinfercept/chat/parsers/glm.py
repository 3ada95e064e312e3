"""GLM 4.5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`, with or without lines between."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jinfercept.chat.parsers.call_grammars import CallGrammar, quoted
from jinfercept.chat.parsers.hermes import CLOSING, OPENING
from jinfercept.chat.parsers.json_values import stream_arguments
from jinfercept.chat.parsers.python_calls import to_json
from jinfercept.chat.parsers.qwen_coder import written_json
from jinfercept.chat.parsers.schema_values import property_types
from jinfercept.chat.parsers.source import Marks, Source, Steps
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat

_KEY, _KEY_END, _VALUE, _VALUE_END = _TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KEY_ENDS, _VALUE_MARKS = Marks((_KEY_END,)), Marks((_VALUE, _VALUE_END))
_NAME_CHAR, _NAME = re.compile(r"[^<>{\s]"), re.compile(r"[^<>{\s]+")


def _read(source: Source) -> Steps[None]:
    while mark := (yield from source.read_content()):
        if mark == OPENING:
            yield from _read_call(source)


def _read_call(source: Source) -> Steps[None]:
    start = source.at
    yield from source.skip()
    name = yield from source.match(_NAME_CHAR)
    char = yield from source.skip()
    # a name is a call only before an argument or a closing tag; one JSON object may hold all arguments
    mark = (yield from source.take(_KEY, CLOSING)) if name and char == "<" else ""
    if not mark and not (name and char == "{"):
        source.leave(start)
        return
    source.begin_call(name, start)
    source.add_arguments("")
    if mark:
        yield from _read_arguments(source, (source.tools or {}).get(name, {}), mark)
    elif (yield from stream_arguments(source)):
        yield from source.skip()
        yield from source.take(CLOSING)
        source.end_call()


def _read_arguments(source: Source, schema: Mapping[str, Any], mark: str) -> Steps[None]:
    keys = set[str]()
    while mark == _KEY:
        start = source.at
        yield from source.skip_until(_KEY_ENDS)
        key = source.text[start : source.at].strip()
        yield from source.take(_KEY_END)
        yield from source.skip()
        if not (yield from source.take(_VALUE)):
            return
        start = source.at
        value = yield from _read_value(source)
        if value is None:
            return
        if key not in keys:
            text = written_json(source.text[start : value.end], property_types(schema, key))
            source.add_arguments(f"{', ' if keys else '{'}{to_json(key)}: {text}")
            keys.add(key)
        mark = value.mark
    source.add_arguments("}" if keys else "{}")
    source.end_call()


class _Value(NamedTuple):
    end: int
    after: int
    mark: str


def _read_value(source: Source) -> Steps[_Value | None]:
    """Pass over a value and the tag after it; None if the value is cut off.

    Values are not escaped, so a value may quote the markup around it. A value ends at a closing tag that closes no value opened
    within it, if a tag that may follow a value or the end of the turn comes next. Otherwise it ends at the first closing tag
    before such a tag.
    """
    value, depth = None, 0
    while tag := (yield from source.skip_until(_VALUE_MARKS)):
        end = source.at
        source.at = after = end + len(tag)
        if tag == _VALUE:
            depth += 1
            continue
        char = yield from source.skip()
        mark = yield from source.take(_KEY, CLOSING)
        if mark or not char:
            this = _Value(end, source.at, mark)
            value = value or this
            if not depth:
                value = this
                break
        source.at, depth = after, max(0, depth - 1)
    if value is None or (source.cut and not tag):
        source.at = len(source.text)
        return None
    source.at = value.after
    return value


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        # arguments are one JSON object: plain text cannot express every schema
        return rf'{quoted(name)} "\n" {calls.arguments(name, schema)} "\n"'

    return calls.several(f"{calls.tag(OPENING)} {calls.each(write, _NAME)} {calls.tag(CLOSING)}", r'"\n"?')


GLM45 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: OPENING in template and _KEY in template,
    tags=(OPENING, CLOSING, *_TAGS),
    turn_ends=("<|observation|>", "<|user|>", "<|endoftext|>"),
)
