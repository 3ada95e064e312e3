"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`: keys are bare, and texts are not escaped."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jinfercept.chat.parsers.json_calls import distinct
from jinfercept.chat.parsers.python_calls import to_json
from jinfercept.chat.parsers.source import Marks, Source, Steps
from jinfercept.chat.parsers.tool_call_format import NAME, CallGrammar, ToolCallFormat, quoted

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_QUOTES = Marks((_QUOTE,))
_NAME_CHAR, _WORD_CHAR = re.compile(r"[^\s{<]"), re.compile(r'[^{}\[\],:"<]')
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


def _read(source: Source) -> Steps[None]:
    while mark := (yield from source.read_content()):
        if mark != _OPENING:
            continue
        # JSON's quotes, words without quotes (which are texts) and a missing closing tag are accepted; a call needs an object
        begin = source.at
        yield from source.skip()
        has_prefix, start = (yield from source.take("call:")), source.at
        name = yield from source.match(_NAME_CHAR)
        first = yield from source.skip()
        arguments = (yield from _read_arguments(source)) if has_prefix and name and first == "{" else None
        if arguments is None:
            source.leave(begin)
        else:
            source.write_call(name, start, arguments)


def _read_arguments(source: Source) -> Steps[str | None]:
    parts, depth = list[str](), 0
    while char := (yield from source.skip()):
        if char in "{}[],:":
            source.at += 1
            parts.append(char)
            depth += (char in "{[") - (char in "}]")
            if not depth:
                with suppress(ValueError, RecursionError):
                    return to_json(json.loads("".join(parts), object_pairs_hook=distinct))
                return None
        elif char == '"':
            start, char = source.at, ""
            while char != '"':
                source.at += 1
                char = yield from source.peek()
                if char == "\\":
                    source.at += 1
                    char = yield from source.peek()
                    char = char and "\\"
                if not char:
                    return None
            source.at += 1
            parts.append(source.text[start : source.at])
        elif (yield from source.take(_QUOTE)):
            start = source.at
            if not (yield from source.skip_until(_QUOTES)):
                return None
            parts.append(json.dumps(source.text[start : source.at], ensure_ascii=False))
            source.at += len(_QUOTE)
        else:
            word = (yield from source.match(_WORD_CHAR)).strip()
            if not word:
                return None
            is_value = _LITERAL.fullmatch(word) and (yield from source.peek()) != ":"
            parts.append(word if is_value else json.dumps(word, ensure_ascii=False))
    return None


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        # arguments are JSON: texts without escapes cannot express every schema
        return f"{quoted(f'call:{name}')} {calls.arguments(name, schema)}"

    return calls.several(f"{calls.tag(_OPENING)} {calls.each(write, NAME)} {calls.tag(_CLOSING)}", "")


GEMMA4 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _CLOSING in template,
    tags=(_OPENING, _CLOSING, _QUOTE),
    turn_ends=("<turn|>", "<|tool_response>"),
)
