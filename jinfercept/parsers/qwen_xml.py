"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, values written as text."""

import re
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.python_calls import to_json
from jinfercept.parsers.schema_values import property_of, value_of
from jinfercept.parsers.source import Marks, Source, Steps

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]")
_NEXT_VALUE = "\n" + PARAMETER
_VALUE_ENDS = Marks((PARAMETER_END, FUNCTION_END, _NEXT_VALUE))


def qwen3_coder(source: Source) -> Steps[None]:
    """Reads a turn.

    Tags are never content. A call begins with `<function=…>`, its `<tool_call>` may be missing; what stands beside parameters
    is left out. A value ends at a `</parameter>` or `</function>` with markup behind it, or before a line that begins with the
    next parameter. It becomes JSON as the tool's schema says (`schema_values`), one piece of the arguments for each. Closing
    tags may be missing where the turn ends after a value; a call that ends within one, or before any, is cut off.
    """
    while mark := (yield from source.content()):
        if mark == FUNCTION:
            yield from _read_call(source)


def _read_call(source: Source) -> Steps[None]:
    """Read `name>…</function>`, or leave it as content."""
    start = source.at
    name = (yield from source.match(_NAME)).strip()
    if not name or (yield from source.peek()) != ">":
        if not source.ended or source.at < len(source.text):
            source.at = start
        else:
            source.drop()
        return
    source.at += 1
    source.begin(name, start)
    source.argue("")
    schema = (source.tools or {}).get(name, {})
    marks = Marks(tuple(tag for tag in source.tags if tag != PARAMETER_END))
    separator, rest = "{", source.at
    while (mark := (yield from source.until(marks))) == PARAMETER:
        source.at += len(PARAMETER)
        key = (yield from source.match(_NAME)).strip()
        if (yield from source.peek()) != ">":
            continue
        source.at += 1
        text = yield from _read_value(source)
        if text is None:
            return
        source.argue(f"{separator}{to_json(key)}: {_json(text, property_of(schema, key))}")
        separator, rest = ", ", source.at
    if not mark and (separator == "{" or source.text[rest:].strip()):
        return
    if mark == FUNCTION_END:
        source.at += len(FUNCTION_END)
    source.argue("{}" if separator == "{" else "}")
    source.end()


def _read_value(source: Source) -> Steps[str | None]:
    """Pass over a value and what closes it; None if it is cut off. One line break on each side is no part of it."""
    start = source.at
    while mark := (yield from source.until(_VALUE_ENDS)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark == _NEXT_VALUE:
            ends = (yield from source.match(_NAME)) and (yield from source.peek()) == ">"
        else:
            ends = not (yield from source.skip()) or (yield from _markup_follows(source))
        source.at = after
        if ends:
            source.at = after if mark == PARAMETER_END else end
            break
    else:
        return None
    return source.text[start:end].removeprefix("\n").removesuffix("\n")


def _json(text: str, property: Mapping[str, Any]) -> str:
    """A value as JSON, as its schema says; as text where JSON cannot say it."""
    try:
        return to_json(value_of(text, property))
    except (ValueError, RecursionError):
        return to_json(text)


def _markup_follows(source: Source) -> Steps[bool]:
    """Whether a tag is next that may stand behind a value, or what ends the turn."""
    return bool((yield from source.take(*(tag for tag in source.tags if tag != PARAMETER_END))))
