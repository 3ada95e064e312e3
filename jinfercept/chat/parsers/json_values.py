"""Reads JSON values while they are written. Only brackets and strings are checked."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, final

from jinfercept.chat.parsers.source import Source, Steps

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_MEMBERS = re.compile(r'["{}\[\]<,]')
_SCALAR = re.compile(r"[\w.+-]")
_CLOSES = {"{": "}", "[": "]"}
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


class Broken(Exception):
    """The text is not a call."""


class TextEnded(Exception):
    """The text ends within a call."""


def read_short_string(source: Source, among: Collection[str] | None = None) -> Steps[str]:
    """Read a key or a name, without markup and line breaks.

    Raises `Broken` at the first character that fits none of the possible values `among`.
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


def stream_call(source: Source, name: str, start: int, call_id: str = "", behind: str = "") -> Steps[None]:
    """Write a call whose arguments, an object, begin here, while they arrive; then skip the characters `behind`."""
    source.begin_call(name, start, call_id)
    if (yield from stream_arguments(source)):
        source.end_call()
    if behind:
        yield from source.skip(behind)


def stream_arguments(source: Source) -> Steps[bool]:
    """Write the value that begins here as the open call's arguments, while it arrives. Returns whether it is complete."""
    try:
        yield from stream_value(source)
    except Broken:
        return True
    except TextEnded:
        return False
    return True


def stream_value(source: Source) -> Steps[None]:
    """Write a value as `stream_arguments` does. Raises `Broken` or `TextEnded` for an incomplete one.

    An object breaks off at a repeated key. A quotation whose quotes are not escaped could give an argument another value, since
    JSON readers take the last one.
    """
    parts: list[str] = []
    reading, waits = read_value(source, parts, _ObjectKeys()), True
    while waits:
        try:
            waits = next(reading, False) is None
        finally:
            source.add_arguments("".join(parts))
            parts.clear()
        if waits:
            yield


@final
class _ObjectKeys:
    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._parts: list[str] = []  # of the key that is read
        self.expected = False  # the next string is a key

    def add(self, part: str) -> None:
        if self.expected:
            self._parts.append(part)

    def end_string(self) -> None:
        if not self.expected:
            return
        written = "".join(self._parts)
        with suppress(ValueError):
            written = json.loads(f'"{written}', strict=False)
        if written in self._keys:
            raise Broken
        self._keys.add(written)
        self._parts, self.expected = [], False


def read_value(source: Source, parts: list[str], keys: _ObjectKeys | None = None) -> Steps[None]:
    """Pass over a JSON value, checking only brackets and strings.

    The text may be cut while this waits, so no offset is kept.

    Args:
        parts: gets the value as it arrives; control characters in strings, such as line breaks, are escaped.
        keys: gets the keys of an object; `Broken` is raised for a repeated key.
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
        outside = _MEMBERS if keys is not None and closing == ["}"] else _OUTSIDE
        delimiter = (_INSIDE if inside else outside).search(source.text, start)
        char = delimiter[0] if delimiter else ""
        source.at = (
            delimiter.end() if delimiter and char != "<" else delimiter.start() if delimiter else len(source.text)
        )
        part = source.text[start : source.at]
        parts.append(part.translate(_ESCAPES) if inside else part)
        if keys is not None and inside:
            keys.add(part)
        if not delimiter:
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
            if keys is not None:
                keys.add(parts[-1])
        elif char == '"':
            if keys is not None and inside:
                keys.end_string()
            inside = not inside
        elif char == ",":
            assert keys is not None
            keys.expected = True
        elif char in _CLOSES:
            closing.append(_CLOSES[char])
            if keys is not None and closing == ["}"]:
                keys.expected = True
        elif char != closing.pop():
            raise Broken
        if delimiter and not closing and not inside:
            return


def plain_arguments(value: str) -> str:
    """Unquote arguments that are an object within a string, and replace `null` by `{}`. Other values stay."""
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        inner = json.loads(value, strict=False)
        inner.encode()
        return inner if isinstance(json.loads(inner, object_pairs_hook=distinct), dict) else value
    except (ValueError, RecursionError):
        return value


def distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from members. Raises `ValueError` for a repeated key."""
    value = dict(members)
    if len(value) < len(members):
        raise ValueError("a key comes twice")
    return value
