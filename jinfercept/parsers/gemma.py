"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, objects with bare keys and marks for quotes.

Arguments become JSON when a call is complete. Its texts have no escapes, so that none can hold the mark.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar, check_name
from jinfercept.parsers.json_values import distinct
from jinfercept.parsers.lark import pattern, quoted
from jinfercept.parsers.named_calls import NAME_CHAR
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.tool_schemas import constraints, named_arguments

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r"[\w.$-]+")
_TOKEN = re.compile(
    rf'{re.escape(_QUOTE)}(?P<text>.*?){re.escape(_QUOTE)}|"(?:[^"\\]|\\.)*"|(?P<key>[\w.$-]+)(?=\s*:)', re.DOTALL
)
_CLOSES = {"{": "}", "[": "]"}


def _read(source: Source) -> Steps[None]:
    """Read a turn. A call that is cut off where the turn ends is dropped; text behind the tag that is no call is content."""
    while mark := (yield from source.read_content()):
        if mark != _OPENING:
            continue
        start = source.at
        yield from source.skip()
        yield from source.take("call:")
        first = source.at
        name = yield from source.match(NAME_CHAR)
        begin = source.at
        if name and (yield from source.peek()) == "{" and (yield from _skip_object(source)):
            arguments = _as_json(source.text[begin : source.at])
            if arguments is not None:
                source.begin_call(name, first)
                source.add_arguments(arguments)
                source.end_call()
                continue
        if source.ended and source.at == len(source.text):
            source.drop_rest()
        else:
            source.at = start


def _skip_object(source: Source) -> Steps[bool]:
    """Pass over an object; returns whether its brackets fit and all of them close."""
    closing: list[str] = []
    while char := (yield from source.peek()):
        quote = (yield from source.take(_QUOTE)) if char == "<" else '"' if char == '"' else ""
        if char == "<" and not quote:
            return False
        if quote:
            source.at += len(quote) if quote == '"' else 0
            if not (yield from _skip_text(source, quote)):
                return False
            continue
        source.at += 1
        if char in _CLOSES:
            closing.append(_CLOSES[char])
        elif char in "]}":
            if char != closing.pop():
                return False
            if not closing:
                return True
    return False


def _skip_text(source: Source, quote: str) -> Steps[bool]:
    """Pass over a text and the quote behind it; returns whether there is one."""
    while char := (yield from source.peek()):
        if char == quote[0] and (yield from source.take(quote)):
            return True
        source.at += 1
        if char == "\\" and quote == '"' and (yield from source.peek()):
            source.at += 1
    return False


def _as_json(text: str) -> str | None:
    """The object as JSON; None if it is none."""

    def written(token: re.Match[str]) -> str:
        plain = token["text"] if token["text"] is not None else token["key"]
        return token[0] if plain is None else json.dumps(plain, ensure_ascii=False)

    try:
        arguments = _TOKEN.sub(written, text)
        json.loads(arguments, object_pairs_hook=distinct)
        arguments.encode()
    except (ValueError, RecursionError):
        return None
    return arguments


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        members: list[tuple[str, bool]] = []
        for key, value, needed in named_arguments(name, schema):
            check_name(_KEY, key, "argument")
            plain = value.get("type") == "string" and constraints(value) == {"type"}
            quote = calls.tag(_QUOTE)
            text = f"{quote} {pattern('[^<]*')} {quote}" if plain else calls.rules.json(value)
            members.append((f"{quoted(f'{key}:')} {text}", needed))
        return f"{quoted(f'call:{name}{{')} {calls.rules.listed(members, quoted(','))} {quoted('}')}"

    return calls.several(f"{calls.tag(_OPENING)} {calls.each(write, _NAME)} {calls.tag(_CLOSING)}", "")


GEMMA4 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _CLOSING in template,
    tags=(_OPENING, _CLOSING, _QUOTE),
    turn_ends=("<turn|>", "<|tool_response>"),
)
