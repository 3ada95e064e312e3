"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` within a section of calls."""

import re

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.named_calls import NAME_CHAR, Head, NamedCalls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_ID_FORM = r"functions\..+:\d+"


def _read_head(source: Source) -> Steps[Head | None]:
    """Read the id of a call, which has its name."""
    start = source.at
    call_id = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if not call_id or not (yield from source.take(_ARGUMENTS)):
        return None
    parts = _ID.fullmatch(call_id)
    assert parts is not None
    return Head(parts[1], start + parts.start(1), call_id)


def _write_head(calls: CallGrammar, name: str) -> str:
    return f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {calls.tag(_ARGUMENTS)}"


_CALLS = NamedCalls(
    opening="<|tool_call_begin|>",
    closing="<|tool_call_end|>",
    read_head=_read_head,
    write_head=_write_head,
    sections=(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
)
KIMI_K2 = ToolCallFormat(
    read=_CALLS.read,
    grammar=_CALLS.grammar,
    detect=lambda template: _ARGUMENTS in template,
    tags=(*_CALLS.tags, _ARGUMENTS),
    turn_ends=("<|im_end|>",),
    ids=_ID_FORM,
)
