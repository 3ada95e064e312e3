"""Functionary 3.2: `>>>name` and the arguments on the next line. 3.1 is among `named_families`.

A turn is messages, each to a tool or, as `>>>all`, to the user; the prompt ends with the first `>>>`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.json_values import stream_call
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.llama import LLAMA3_TURN_ENDS
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_RECIPIENT, _USER = ">>>", "all"
_TOOL_NAME = re.compile(rf"(?!{_USER}$)[\w.:/-]+")


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    Only the name of a tool that is offered, with an object on the next line, is a call: `>>>` is text elsewhere, such as in a
    session of Python.
    """
    start = source.at
    yield from source.skip()
    if not (yield from _read_message(source)):
        source.at = start
    while mark := (yield from source.read_content()):
        if mark == _RECIPIENT and not (yield from _read_message(source)):
            source.add_content(len(mark))


def _read_message(source: Source) -> Steps[bool]:
    """Read a call, or pass over what addresses the user; returns whether either stands here, and stays here otherwise."""
    start = source.at
    yield from source.take(_RECIPIENT)
    first = source.at
    header = yield from source.take(*(f"{name}\n" for name in (_USER, *(source.tools or ()))))
    if header == f"{_USER}\n":
        source.begin_paragraph()
        return True
    if header and (yield from source.skip()) == "{":
        yield from stream_call(source, header[:-1], first, behind=" \t\r\n}")
        return True
    source.at = start
    return False


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        return f"{quoted(f'{name}\n')} {calls.arguments(name, schema)}"

    return calls.several(calls.each(write, _TOOL_NAME), quoted(_RECIPIENT))


FUNCTIONARY_V32 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: f"{_RECIPIENT}{_USER}" in template,
    tags=(),
    turn_ends=LLAMA3_TURN_ENDS,
    openings=(_RECIPIENT,),
    frames_text=True,
)
