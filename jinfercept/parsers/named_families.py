"""The families whose calls have their name in markup, before one JSON object (`named_calls`), each by its tags and heads.

* Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` within a section of calls.
* Solar: `<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>`; text stands in markup too.
* DeepSeek: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` since V3.1, and before it, in V3 and R1,
  `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, and the arguments in a block of code.
* Functionary 3.1: `<function=name>{…}</function>`.
"""

import re
from dataclasses import replace

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.llama import LLAMA3_TURN_ENDS
from jinfercept.parsers.named_calls import NAME_CHAR, Head, NamedCalls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_KIMI_ID_FORM = r"functions\..+:\d+"


def _read_kimi_head(source: Source) -> Steps[Head | None]:
    """Read the id of a call, which has its name."""
    start = source.at
    call_id = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if not call_id or not (yield from source.take(_KIMI_ARGUMENTS)):
        return None
    parts = _KIMI_ID.fullmatch(call_id)
    assert parts is not None
    return Head(parts[1], start + parts.start(1), call_id)


_KIMI = NamedCalls(
    opening="<|tool_call_begin|>",
    closing="<|tool_call_end|>",
    read_head=_read_kimi_head,
    write_head=lambda calls, name: f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {calls.tag(_KIMI_ARGUMENTS)}",
    sections=(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
)
KIMI_K2 = ToolCallFormat(
    read=_KIMI.read,
    grammar=_KIMI.grammar,
    detect=lambda template: _KIMI_ARGUMENTS in template,
    tags=(*_KIMI.tags, _KIMI_ARGUMENTS),
    turn_ends=("<|im_end|>",),
    ids=_KIMI_ID_FORM,
)


_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_ID_CHAR = re.compile(r"\w|-")


def _read_solar_head(source: Source) -> Steps[Head | None]:
    call_id = yield from source.match(_SOLAR_ID_CHAR)
    if not (yield from source.take(_SOLAR_NAME)):
        return None
    start = source.at
    name = yield from source.match(NAME_CHAR)
    if not name or not (yield from source.take(_SOLAR_ARGUMENTS)):
        return None
    return Head(name, start, call_id)


def _write_solar_head(calls: CallGrammar, name: str) -> str:
    return f"/[a-z0-9]{{10}}/ {calls.tag(_SOLAR_NAME)} {quoted(name)} {calls.tag(_SOLAR_ARGUMENTS)}"


_SOLAR = NamedCalls("<|tool_call:begin|>", "<|tool_call:end|>", _read_solar_head, _write_solar_head)


SOLAR = ToolCallFormat(
    read=_SOLAR.read,
    grammar=lambda calls: (
        f'({calls.tag("<|begin|>")} "assistant")? {calls.tag("<|tool_calls|>")} {_SOLAR.grammar(calls)}'
    ),
    detect=lambda template: _SOLAR_ARGUMENTS in template,
    tags=(
        *_SOLAR.tags,
        _SOLAR_NAME,
        _SOLAR_ARGUMENTS,
        "<|begin|>assistant",
        "<|content|>",
        "<|tool_calls|>",
        "<|end|>",
    ),
    turn_ends=("<|calls|>", "<|flush|>"),
    frames_text=True,
)


_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_TOOLS = re.compile(r"\btools\b")


def _read_deepseek_head(source: Source) -> Steps[Head | None]:
    """Read either form of the part before the arguments."""
    start = source.at
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if not name or not (yield from source.take(_DEEPSEEK_SEPARATOR)):
        return None
    if name != "function" or (yield from source.skip()) in ("{", "<"):
        return Head(name, start)
    start = source.at
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if (yield from source.take(_FENCE)):
        yield from source.take("json")
    return Head(name, start) if name else None


_DEEPSEEK = NamedCalls(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    read_head=_read_deepseek_head,
    write_head=lambda calls, name: f"{quoted(name)} {calls.tag(_DEEPSEEK_SEPARATOR)}",
    sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    fence=_FENCE,
)


def _write_deepseek_v3_head(calls: CallGrammar, name: str) -> str:
    return f'"function" {calls.tag(_DEEPSEEK_SEPARATOR)} {quoted(f"{name}\n{_FENCE}json\n")}'


def _detect_deepseek_v31(template: str) -> bool:
    """Some templates write earlier calls, but declare no tools: for those, tools are written as text, with their own format."""
    return _DEEPSEEK_SEPARATOR in template and _TOOLS.search(template) is not None


DEEPSEEK_V3 = ToolCallFormat(
    read=_DEEPSEEK.read,
    grammar=lambda calls: replace(_DEEPSEEK, write_head=_write_deepseek_v3_head, between="\n").grammar(calls),
    detect=lambda template: _detect_deepseek_v31(template) and _FENCE in template,
    tags=(*_DEEPSEEK.tags, _DEEPSEEK_SEPARATOR),
    turn_ends=("<｜end▁of▁sentence｜>",),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3, grammar=lambda calls: replace(_DEEPSEEK, fence="").grammar(calls), detect=_detect_deepseek_v31
)


def _read_functionary_head(source: Source) -> Steps[Head | None]:
    start = source.at
    name = yield from source.match(NAME_CHAR)
    return Head(name, start) if name and (yield from source.take(">")) else None


_FUNCTIONARY = NamedCalls("<function=", "</function>", _read_functionary_head, lambda _, name: quoted(f"{name}>"))
FUNCTIONARY_V31 = ToolCallFormat(
    read=_FUNCTIONARY.read,
    grammar=_FUNCTIONARY.grammar,
    detect=lambda template: "<function=example_function_name>{" in template,
    tags=_FUNCTIONARY.tags,
    turn_ends=LLAMA3_TURN_ENDS,
)
