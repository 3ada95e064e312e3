"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, objects with bare keys and marks for quotes.

Arguments become JSON when a call is complete. Its texts have no escapes, so that none can hold the mark. Short texts may come
without marks.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, final

from jinfercept.parsers.call_grammars import NAME, NAME_CHAR, CallGrammar, check_name
from jinfercept.parsers.lark import one_of, pattern, quoted
from jinfercept.parsers.python_literals import to_json
from jinfercept.parsers.schema_values import item_schema, member_schema, types_of, value_of
from jinfercept.parsers.source import Source, Steps, skip_brackets
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.tool_schemas import Argument, constraints, named_arguments

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY = re.compile(r"[\w.$-]+")
_STRING = re.compile(rf'{re.escape(_QUOTE)}(?P<text>.*?){re.escape(_QUOTE)}|"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]*")
_SPACE = re.compile(r"\s*")
_CLOSES = {"{": "}", "[": "]"}
_QUOTES = {_QUOTE: False, '"': True}
"""The texts around quotes, and whether a backslash escapes there."""


def _read(source: Source) -> Steps[None]:
    """Read a turn. A call that is cut off where the turn ends is dropped; text behind the tag that is no call is content."""
    while mark := (yield from source.read_content()):
        if mark != _OPENING:
            continue
        start = source.at
        yield from source.skip()
        yield from source.take("call:", ":")
        first = source.at
        name = yield from source.match(NAME_CHAR)
        begin = source.at
        if name and (yield from source.peek()) == "{" and (yield from skip_brackets(source, _CLOSES, _QUOTES)):
            arguments = _as_json(source.text[begin : source.at], (source.tools or {}).get(name, {}))
            if arguments is not None:
                source.write_call(name, first, arguments)
                continue
        source.leave(start)


def _as_json(text: str, schema: Mapping[str, Any]) -> str | None:
    """The object as JSON, with white space as it is written; None if it is none.

    Args:
        schema: of the arguments; a value without quotes gets one of its types.
    """
    arguments = _Arguments(text, schema)
    try:
        arguments.read_object(schema)
        written = "".join(arguments.parts)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written if arguments.at == len(text) else None


@final
class _Arguments:
    """Reads the text of an object, whose brackets fit. Its methods raise ValueError for what is none.

    Args:
        root: the schema that `$ref`s point into.

    Attributes:
        at: the offset of the next character.
        parts: the JSON so far.
    """

    def __init__(self, text: str, root: Mapping[str, Any]) -> None:
        self._text, self._root, self.at = text, root, 0
        self.parts: list[str] = []

    def read_object(self, schema: Mapping[str, Any]) -> None:
        self._take("{")
        keys: set[str] = set()
        while self._next() != "}":
            string = _STRING.match(self._text, self.at) or _KEY.match(self._text, self.at)
            key = _plain(string) if string else ""
            if not string or key in keys:
                raise ValueError("no key, or one that comes twice")
            keys.add(key)
            self.at = string.end()
            self.parts.append(to_json(key))
            self._take(":")
            self._read_value(member_schema(schema, key, self._root))
            if self._next() == ",":
                self._take(",")
        self._take("}")

    def _read_value(self, schema: Mapping[str, Any]) -> None:
        char = self._next()
        if char == "{":
            self.read_object(schema)
        elif char == "[":
            self._take("[")
            index = 0
            while self._next() != "]":
                self._read_value(item_schema(schema, index, self._root))
                index += 1
                if self._next() == ",":
                    self._take(",")
            self._take("]")
        elif string := _STRING.match(self._text, self.at):
            self.at = string.end()
            self.parts.append(to_json(_plain(string)))
        else:
            bare = _BARE.match(self._text, self.at)
            assert bare is not None
            self.at = bare.end()
            self.parts.append(_bare_json(bare[0].rstrip(), types_of(schema, self._root)))

    def _next(self) -> str:
        """The next character that is no white space, which is written as it is."""
        space = _SPACE.match(self._text, self.at)
        assert space is not None
        self.at = space.end()
        self.parts.append(space[0])
        return self._text[self.at : self.at + 1]

    def _take(self, char: str) -> None:
        if self._next() != char:
            raise ValueError(f"no {char}")
        self.at += 1
        self.parts.append(char)


def _plain(string: re.Match[str]) -> str:
    """The text of a string between marks, or in JSON, or of a bare key."""
    if string.re is _KEY:
        return string[0]
    return json.loads(string[0], strict=False) if string["text"] is None else string["text"]


def _bare_json(text: str, types: list[str]) -> str:
    """A value without quotes: of one of these types, or a text of one line where JSON has no such value."""
    if "\n" in text:
        raise ValueError("a text of several lines without quotes")
    try:
        return to_json(value_of(text, types)) if types else to_json(json.loads(text))
    except ValueError:
        return to_json(text)


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        options = one_of(
            calls.rules.listed(map(member, option), quoted(",")) for option in named_arguments(name, schema)
        )
        return f"{quoted(f'call:{name}{{')} {options} {quoted('}')}"

    def member(argument: Argument) -> tuple[str, bool]:
        key, value, needed = argument
        check_name(_KEY, key, "argument")
        plain = value.get("type") == "string" and constraints(value) == {"type"}
        quote = calls.tag(_QUOTE)
        text = f"{quote} {pattern('[^<]*')} {quote}" if plain else calls.rules.json(value)
        return f"{quoted(f'{key}:')} {text}", needed

    return calls.several(f"{calls.tag(_OPENING)} {calls.each(write, NAME)} {calls.tag(_CLOSING)}", "")


GEMMA4 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _CLOSING in template,
    tags=(_OPENING, _CLOSING, _QUOTE),
    turn_ends=("<turn|>", "<|tool_response>"),
)
