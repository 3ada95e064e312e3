"""Reads calls that are tags with plain text between them, such as `<function=name><parameter=key>value</parameter></function>`.

The families differ in their tags only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jinfercept.parsers.call_grammars import NAME_CHAR
from jinfercept.parsers.json_values import stream_arguments
from jinfercept.parsers.python_literals import to_json
from jinfercept.parsers.schema_values import may_have, property_types, value_of
from jinfercept.parsers.source import Marks, Source, Steps

_NAME = re.compile(r'[^<>\n"]')


@final
@dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of one family.

    Attributes:
        function, name_end: the texts around a function's name. Without an end the next tag, or white space before it, ends it.
        parameter, key_end: the texts around an argument's key.
        value_start: a tag behind the end of the key, which white space may precede.
        padded: a line break on each side of a value is no part of it.
        outer: the tags around calls, none if empty.
        one_block: the outer tags stand around all calls, not around each.
    """

    function: str
    name_end: str
    function_end: str
    parameter: str
    key_end: str
    parameter_end: str
    value_start: str = ""
    padded: bool = False
    outer: tuple[str, ...] = ()
    one_block: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All of them that are never content."""
        inner = [self.value_start, self.key_end] if self.value_start else []
        return (*self.outer, self.function, self.function_end, self.parameter, *inner, self.parameter_end)

    @property
    def inner(self) -> tuple[str, ...]:
        """The tags that stand within an argument, behind its beginning."""
        return (self.parameter_end, self.value_start, self.key_end)


def read_xml_calls(source: Source, tags: XmlTags) -> Steps[None]:
    """Read a turn.

    Tags are never content. A call begins with its function's tag, the outer tag may be missing; without a parameter or its
    closing tag behind the name it is none. Text beside parameters is dropped. `_read_value` says where a value ends. Each value
    becomes one piece of JSON, of the type in the tool's schema (`schema_values`). All arguments may be one JSON object, in the
    place of parameters. Closing tags may be missing where the turn ends after a value; a call that ends within one, or before
    any, is cut off.
    """
    while mark := (yield from source.read_content()):
        if mark == tags.function:
            yield from _read_call(source, tags)


def _read_call(source: Source, tags: XmlTags) -> Steps[None]:
    """Read a call behind its function's tag, or leave it as content."""
    start = source.at
    name = yield from _read_name(source, tags)
    behind = source.at
    if not name:
        source.leave(start)
        return
    marks = Marks(tuple(tag for tag in source.tags if tag not in tags.inner))
    if (char := (yield from source.skip())) != "{":
        mark = yield from source.skip_until(marks)
        if mark not in (tags.parameter, tags.function_end) and char and source.text[behind : source.at].strip():
            source.at = start
            return
    source.begin_call(name, start)
    source.add_arguments("")
    if char == "{":
        if (yield from stream_arguments(source)):
            yield from source.skip()
            yield from source.take(tags.function_end)
            source.end_call()
    else:
        yield from _read_parameters(source, tags, name, marks)


def _read_parameters(source: Source, tags: XmlTags, name: str, marks: Marks) -> Steps[None]:
    """Read the open call's arguments, each with a tag.

    Args:
        marks: the tags that may stand beside arguments.
    """
    schema = (source.tools or {}).get(name, {})
    keys: set[str] = set()
    rest = source.at

    def is_next(key: str) -> bool:
        return key not in keys and (not keys or may_have(schema, key, schema))

    while (mark := (yield from source.skip_until(marks))) == tags.parameter:
        source.at += len(mark)
        key = yield from _read_key(source, tags)
        if key is None or not is_next(key):
            continue
        separator = ", " if keys else "{"
        keys.add(key)
        text = yield from _read_value(source, tags, is_next)
        if text is None:
            return
        source.add_arguments(f"{separator}{to_json(key)}: {_json(text, property_types(schema, key))}")
        rest = source.at
    if not mark and (not keys or source.text[rest:].strip()):
        return
    if mark == tags.function_end:
        source.at += len(mark)
    source.add_arguments("}" if keys else "{}")
    source.end_call()


def _read_name(source: Source, tags: XmlTags) -> Steps[str]:
    """The name of a function, behind its tag; passes over what ends it. "" if this is no call."""
    if tags.name_end:
        name = (yield from source.match(_NAME)).strip()
        return name if (yield from source.take(tags.name_end)) else ""
    yield from source.skip()
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    end = source.at
    if not (yield from source.take(tags.parameter, tags.function_end, "{")):
        return ""
    source.at = end
    return name


def _read_key(source: Source, tags: XmlTags) -> Steps[str | None]:
    """The key of an argument; passes over what ends it. None if this is no tag."""
    key = (yield from source.match(_NAME)).strip()
    end = yield from source.take(tags.key_end)
    if end and tags.value_start:
        yield from source.skip()
        end = yield from source.take(tags.value_start)
    return key if end else None


def _read_value(source: Source, tags: XmlTags, is_next: Callable[[str], bool]) -> Steps[str | None]:
    """The next value; passes over its closing tag.

    Values are not escaped, so a value may quote the markup that it stands in. It ends at a closing tag that closes no
    parameter opened within the value, before a tag that may follow it. Where there is none up to the end of the function,
    closing tags are missing: it ends where the first tag that may follow it stands, a parameter at the beginning of a line.

    Args:
        is_next: whether an argument of this name may follow: one that the tool has, and that was not given.

    Returns:
        None if the value is cut off.
    """
    start = source.at
    marks = Marks((tags.parameter, tags.parameter_end, tags.function, tags.function_end))
    num_parameters = num_functions = 0  # opened within the value
    first_end: tuple[int, int] | None = None  # of the value, and of the tag that closes it
    while mark := (yield from source.skip_until(marks)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark in (tags.parameter, tags.function):
            is_key = mark == tags.parameter
            key = (yield from _read_key(source, tags)) if is_key else (yield from _read_name(source, tags)) or None
            source.at = after
            if key is None:
                continue
            if mark == tags.parameter and source.text[end - 1] == "\n" and is_next(key):
                first_end = first_end or (end, end)
            num_parameters += mark == tags.parameter
            num_functions += mark == tags.function
            continue
        may_end = yield from _may_follow(source, tags, is_next)
        source.at = after
        if may_end:
            first_end = first_end or (end, after if mark == tags.parameter_end else end)
        if mark == tags.parameter_end:
            if may_end and not num_parameters:
                first_end = (end, after)
                break
            num_parameters = max(0, num_parameters - 1)
        elif may_end and not num_functions:
            break
        else:
            num_functions = max(0, num_functions - 1)
    if first_end is None or (source.cut and not mark):
        source.at = len(source.text)
        return None
    end, source.at = first_end
    return _plain(source.text[start:end], tags, closed=source.at > end)


def _plain(text: str, tags: XmlTags, closed: bool) -> str:
    """A value without what surrounds it; a line break before a tag that is missing is no part of it."""
    if tags.padded:
        return text.removeprefix("\n").removesuffix("\n")
    return text if closed else text.removesuffix("\n")


def _json(text: str, types: list[str]) -> str:
    """A value as JSON, of one of these types; as a string if JSON cannot express it."""
    try:
        return to_json(value_of(text, types))
    except (ValueError, RecursionError):
        return to_json(text)


def _may_follow(source: Source, tags: XmlTags, is_next: Callable[[str], bool]) -> Steps[bool]:
    """Whether the next text is a tag that may stand behind a value, or the end of a turn."""
    if not (yield from source.skip()):
        return True
    mark = yield from source.take(*(tag for tag in source.tags if tag not in tags.inner))
    if mark != tags.parameter:
        return bool(mark)
    key = yield from _read_key(source, tags)
    return not (yield from source.peek()) or (key is not None and is_next(key))
