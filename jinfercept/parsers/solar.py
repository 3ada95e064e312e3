"""Solar: `<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>`; text stands in markup too."""

import re

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.named_calls import NAME_CHAR, Head, NamedCalls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_NAME, _ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_ID_CHAR = re.compile(r"\w|-")


def _read_head(source: Source) -> Steps[Head | None]:
    call_id = yield from source.match(_ID_CHAR)
    if not (yield from source.take(_NAME)):
        return None
    start = source.at
    name = yield from source.match(NAME_CHAR)
    if not name or not (yield from source.take(_ARGUMENTS)):
        return None
    return Head(name, start, call_id)


def _write_head(calls: CallGrammar, name: str) -> str:
    return f"/[a-z0-9]{{10}}/ {calls.tag(_NAME)} {quoted(name)} {calls.tag(_ARGUMENTS)}"


_CALLS = NamedCalls("<|tool_call:begin|>", "<|tool_call:end|>", _read_head, _write_head)


def _grammar(calls: CallGrammar) -> str:
    return f'({calls.tag("<|begin|>")} "assistant")? {calls.tag("<|tool_calls|>")} {_CALLS.grammar(calls)}'


SOLAR = ToolCallFormat(
    read=_CALLS.read,
    grammar=_grammar,
    detect=lambda template: _ARGUMENTS in template,
    tags=(*_CALLS.tags, _NAME, _ARGUMENTS, "<|begin|>assistant", "<|content|>", "<|tool_calls|>", "<|end|>"),
    turn_ends=("<|calls|>", "<|flush|>"),
    frames_text=True,
)
