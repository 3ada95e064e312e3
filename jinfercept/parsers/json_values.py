"""JSON values read while they are written: only their brackets and strings are checked."""

import json
import re
from collections.abc import Collection

from jinfercept.parsers.source import Source, Steps

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[\w.+-]")
_CLOSES = {"{": "}", "[": "]"}
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


class Broken(Exception):
    """The text is not a call."""


class TextEnded(Exception):
    """The text ends within a call."""


def read_short_string(source: Source, among: Collection[str] | None = None) -> Steps[str]:
    """A key or a name, without markup and line breaks.

    Args:
        among: its possible values; `Broken` is raised at the first character that fits none.
    """
    start, char = source.at, (yield from source.peek())
    if char != '"':
        raise Broken if char else TextEnded
    source.at += 1
    while (char := (yield from source.peek())) != '"':
        if not char:
            raise TextEnded
        if char in "<[\n":
            raise Broken
        source.at += 1
        if char == "\\" and (yield from source.peek()):
            source.at += 1
        if among is not None and not any(text.startswith(source.text[start + 1 : source.at]) for text in among):
            raise Broken
    source.at += 1
    try:
        value = json.loads(source.text[start : source.at])
        value.encode()
    except ValueError:
        raise Broken from None
    if among is not None and value not in among:
        raise Broken
    return value


def stream_arguments(source: Source) -> Steps[bool]:
    """Write the value that begins here as the open call's arguments, while it comes; returns whether it is complete."""
    try:
        yield from stream_value(source)
    except Broken:
        return True
    except TextEnded:
        return False
    return True


def stream_value(source: Source) -> Steps[None]:
    """As `stream_arguments`; raises `Broken` or `TextEnded` for an incomplete value."""
    parts: list[str] = []
    reading, waits = read_value(source, parts), True
    while waits:
        try:
            waits = next(reading, False) is None
        finally:
            source.add_arguments("".join(parts))
            parts.clear()
        if waits:
            yield


def read_value(source: Source, parts: list[str]) -> Steps[None]:
    """Pass over a JSON value; checks brackets and strings only. While it waits the text may be cut, so it remembers no offset.

    Args:
        parts: gets the value as it comes; control characters in strings, such as line breaks, are escaped.
    """
    if (yield from source.peek()) not in ("{", "[", '"'):
        parts.append((yield from source.match(_SCALAR)))
        if not parts[-1]:
            raise Broken if source.at < len(source.text) else TextEnded
        return
    closing: list[str] = []
    inside = False
    while True:
        start = source.at
        found = (_INSIDE if inside else _OUTSIDE).search(source.text, start)
        char = found[0] if found else ""
        source.at = found.end() if found and char != "<" else found.start() if found else len(source.text)
        part = source.text[start : source.at]
        parts.append(part.translate(_ESCAPES) if inside else part)
        if not found:
            if source.ended:
                raise TextEnded
            yield
        elif char == "<":
            raise Broken
        elif char == "\\":
            parts.append((yield from source.peek()))
            if not parts[-1]:
                raise TextEnded
            source.at += 1
        elif char == '"':
            inside = not inside
        elif char in _CLOSES:
            closing.append(_CLOSES[char])
        elif char != closing.pop():
            raise Broken
        if found and not closing and not inside:
            return


def plain_arguments(value: str) -> str:
    """Arguments as an object, if they are `null` or an object within a string; other values stay."""
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        inner = json.loads(value, strict=False)
        inner.encode()
        return inner if isinstance(json.loads(inner), dict) else value
    except (ValueError, RecursionError):
        return value
