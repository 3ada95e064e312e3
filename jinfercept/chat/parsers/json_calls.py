"""Reads calls whose arguments are JSON, while they are written: `{"name": …, "arguments": {…}}`, or a name and an object.

Of JSON, only brackets, strings and repeated keys are checked.
"""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, final

from jinfercept.chat.parsers.python_calls import read_literal_call
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


_SPACE = " \t\r\n"
_ARGUMENT_KEYS = {"arguments", "parameters"}
_OTHER_KEYS = {"type", "id"}
_KEYS = {"name"} | _ARGUMENT_KEYS | _OTHER_KEYS
BARE_OBJECTS = {"{": "", "```": "```"}
"""Texts that calls without their tags may begin with, and the text that may close them."""


def read_calls(source: Source, tagged: bool, names: Collection[str] | None = None) -> Steps[bool]:
    """Read call objects in a row, in a list or not, with white space, commas and semicolons between them.

    Text that is no call can be read again. A call begins when its name and the first character of its arguments are known, and
    stays a call from there on. Arguments break off where a bracket does not fit, or at a `<` outside a string; they stay as
    written, and running the call reports them. A call that is cut off never gets its `CallEnded`. A missing or additional `}`
    after the arguments does not matter. Arguments within a string are unquoted, and line breaks within strings are escaped. An
    id counts if it stands before the arguments.

    Args:
        tagged: a tag stands before, so the text is a call unless it cannot be one: unknown keys are skipped, arguments may be
            missing or no object, and a call that is cut off is dropped. Without a tag, doubtful text is content.
        names: the tools that can be called; None: any.

    Returns:
        Whether there was a call.
    """
    start, has_call = source.at, False
    if (yield from source.skip(_SPACE)) == "[" and tagged:
        source.at += 1
    while (char := (yield from source.skip(_SPACE + ",;" if has_call else _SPACE))) == "{":
        if not (yield from _read_call(source, tagged, names)):
            break
        start, has_call = source.at, True
    if tagged and not has_call and not char:
        source.drop_rest()
        return False
    source.at = start
    if has_call:
        yield from source.skip(_SPACE + "}])")
    return has_call


def read_bare_calls(source: Source, opening: str, closing: str) -> Steps[None]:
    """Read calls without tags that begin here with `opening`, a key of `BARE_OBJECTS` for example, or write it as content.

    Only an object that begins a line and names an offered tool is a call, since prose may quote other objects. The text
    `closing`, if it is not empty, may close the calls.
    """
    start = source.at
    if source.begins_line and source.tools:
        if opening != "{":
            source.at += len(opening)
            yield from source.take("json")
        if (yield from read_calls(source, tagged=False, names=source.tools)):
            if closing:
                yield from source.take(closing)
            return
    source.at = start
    source.add_content(len(opening))


def _read_call(source: Source, tagged: bool, names: Collection[str] | None) -> Steps[bool]:
    start, name, call_id = source.at, "", ""
    arguments: str | None = None  # those that have been read as a whole
    begun = whole = False  # whole: name and arguments are complete
    try:
        source.at += 1
        is_literal = tagged and (yield from source.skip(_SPACE)) == "'"  # as Python prints it, as Mistral 7B often does
        if is_literal:
            source.at = start
            if (literal_call := (yield from read_literal_call(source))) is None:
                raise TextEnded if source.ended and source.at == len(source.text) else Broken
            name, arguments = literal_call
        while not is_literal and (yield from source.skip(" \t\r\n,")) != "}":
            key = yield from read_short_string(source, None if tagged or begun else _KEYS)
            if (char := (yield from source.skip())) != ":":
                raise Broken if char else TextEnded
            source.at += 1
            char = yield from source.skip()
            if key == "name" and not name:
                if not (name := (yield from read_short_string(source, names))):
                    raise Broken
            elif key in _ARGUMENT_KEYS and arguments is None and not whole:
                if name and char in ("{", "["):
                    if char == "[" and not tagged:
                        raise Broken
                    begun = _begin(source, name, start, call_id, "")
                    yield from stream_value(source)
                    whole = True
                else:
                    yield from read_value(source, parts := list[str]())
                    if char != "{" and not tagged:
                        raise Broken
                    arguments = plain_arguments("".join(parts))
            elif key == "id" and not begun and char == '"':
                call_id = yield from read_short_string(source)
            elif begun or tagged or key in _OTHER_KEYS:
                yield from read_value(source, [])
            else:
                raise Broken
            if name and arguments is not None and not begun:
                begun = whole = _begin(source, name, start, call_id, arguments)
        if not is_literal:
            source.at += 1
        if name and not begun and tagged:
            begun = whole = _begin(source, name, start, call_id, arguments or "{}")
    except Broken:
        whole = begun
    except TextEnded:
        if tagged and not begun:
            source.drop_rest()
            return True
    if whole:
        source.end_call()
    elif not begun:
        source.at = start
    return begun


def _begin(source: Source, name: str, start: int, call_id: str, arguments: str) -> bool:
    source.begin_call(name, start, call_id)
    source.add_arguments(arguments)
    return True
