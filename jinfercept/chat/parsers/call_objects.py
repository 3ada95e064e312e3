"""Reads calls that are JSON objects, `{"name": …, "arguments": {…}}`, while they are written."""

from collections.abc import Collection

from jinfercept.chat.parsers.json_values import (
    Broken,
    TextEnded,
    plain_arguments,
    read_short_string,
    read_value,
    stream_value,
)
from jinfercept.chat.parsers.python_calls import read_literal_call
from jinfercept.chat.parsers.source import Source, Steps

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
