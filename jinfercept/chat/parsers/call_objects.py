"""Calls written as JSON objects, `{"name": …, "arguments": {…}}`, read while they are written."""

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
    """Read call objects one after another, in a list or not, between them white space, commas and semicolons.

    Text that is no call can be read again. A call begins when its name and the first character of its arguments are known; from
    there on it stays a call. Arguments that break off, where a bracket does not fit or at a `<` outside a string, stay as
    written; running the call reports them. A call that the text ends within never gets its `CallEnded`. A missing `}` behind
    the arguments does not matter, nor one too many. Arguments within a string are unquoted. An id counts if it stands before
    the arguments. Line breaks within strings are escaped; otherwise arguments stay as written.

    Args:
        tagged: a tag stands before, so that text is a call unless it cannot be one: unknown keys are skipped, arguments may
            be missing or no object, and a call that is cut off is dropped. Otherwise doubtful text is content.
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
    """Read calls without tags that begin here, or the opening as content.

    Only an object at the beginning of a line that names a tool that is offered is a call: prose may quote others.

    Args:
        opening: the text that stands here, such as those of `BARE_OBJECTS`.
        closing: the text that may close them; empty if there is none.
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
    """Read the object that begins here; returns whether it is a call, and goes back to its start if not."""
    start = source.at
    reading = _CallObject(source, tagged, names)
    try:
        yield from reading.read()
    except Broken:
        reading.whole = reading.begun
    except TextEnded:
        if tagged and not reading.begun:
            source.drop_rest()
            return True
    if reading.whole:
        source.end_call()
    elif not reading.begun:
        source.at = start
    return reading.begun


class _CallObject:
    """The state of reading one object."""

    def __init__(self, source: Source, tagged: bool, names: Collection[str] | None) -> None:
        self._source, self._tagged, self._names, self._start = source, tagged, names, source.at
        self._name: str | None = None
        self._id = ""
        self._early_arguments: str | None = None  # arguments that stand before the name
        self.begun = False
        self.whole = False  # name and arguments are complete

    def read(self) -> Steps[None]:
        source = self._source
        source.at += 1
        if self._tagged and (yield from source.skip(_SPACE)) == "'":
            source.at = self._start
            literal_call = yield from read_literal_call(source)  # as Python prints it, which Mistral 7B often writes
            if literal_call is None:
                raise TextEnded if source.ended and source.at == len(source.text) else Broken
            self._name, arguments = literal_call
            self._begin(arguments)
            self.whole = True
            return
        while True:
            char = yield from source.skip(" \t\r\n,")
            if char == "}":
                source.at += 1
                break
            key = yield from read_short_string(source, None if self._tagged or self.begun else _KEYS)
            if (char := (yield from source.skip())) != ":":
                raise Broken if char else TextEnded
            source.at += 1
            yield from source.skip()
            yield from self._member(key)
        if self._name is not None and not self.begun and self._tagged:
            self._begin(self._early_arguments or "{}")
            self.whole = True

    def _member(self, key: str) -> Steps[None]:
        source = self._source
        if key == "name" and self._name is None:
            self._name = yield from read_short_string(source, self._names)
            if not self._name:
                raise Broken
            if self._early_arguments is not None:
                self._begin(self._early_arguments)
                self.whole = True
        elif key in _ARGUMENT_KEYS and self._early_arguments is None and not self.whole:
            yield from self._arguments()
        elif key == "id" and not self.begun and (yield from source.peek()) == '"':
            self._id = yield from read_short_string(source)
        elif self.begun or self._tagged or key in _OTHER_KEYS:
            yield from read_value(source, [])
        else:
            raise Broken

    def _arguments(self) -> Steps[None]:
        source = self._source
        char = yield from source.peek()
        if self._name is None or char not in ("{", "["):
            parts: list[str] = []
            yield from read_value(source, parts)
            if char != "{" and not self._tagged:
                raise Broken
            self._early_arguments = plain_arguments("".join(parts))
            if self._name is not None:
                self._begin(self._early_arguments)
                self.whole = True
            return
        if char != "{" and not self._tagged:
            raise Broken
        self._begin("")
        yield from stream_value(source)
        self.whole = True

    def _begin(self, arguments: str) -> None:
        assert self._name is not None
        self._source.begin_call(self._name, self._start, self._id)
        self._source.add_arguments(arguments)
        self.begun = True
