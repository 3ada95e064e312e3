"""Functionary 3.1: `<function=name>{…}</function>`."""

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.llama import LLAMA3_TURN_ENDS
from jinfercept.parsers.named_calls import NAME_CHAR, Head, NamedCalls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat


def _read_head(source: Source) -> Steps[Head | None]:
    start = source.at
    name = yield from source.match(NAME_CHAR)
    return Head(name, start) if name and (yield from source.take(">")) else None


def _write_head(calls: CallGrammar, name: str) -> str:
    return quoted(f"{name}>")


_CALLS = NamedCalls("<function=", "</function>", _read_head, _write_head)
FUNCTIONARY = ToolCallFormat(
    read=_CALLS.read,
    grammar=_CALLS.grammar,
    detect=lambda template: "<function=example_function_name>{" in template,
    tags=_CALLS.tags,
    turn_ends=LLAMA3_TURN_ENDS,
)
