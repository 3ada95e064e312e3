"""DeepSeek: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` since V3.1, and before it, in V3 and R1,
`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, and the arguments in a block of code.
"""

import re
from dataclasses import replace

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.named_calls import NAME_CHAR, Head, NamedCalls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_TOOLS = re.compile(r"\btools\b")


def _read_head(source: Source) -> Steps[Head | None]:
    """Read either form of the part before the arguments."""
    start = source.at
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if not name or not (yield from source.take(_SEPARATOR)):
        return None
    if name != "function" or (yield from source.skip()) in ("{", "<"):
        return Head(name, start)
    start = source.at
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    if (yield from source.take(_FENCE)):
        yield from source.take("json")
    return Head(name, start) if name else None


_V31 = NamedCalls(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    read_head=_read_head,
    write_head=lambda calls, name: f"{quoted(name)} {calls.tag(_SEPARATOR)}",
    sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    fence=_FENCE,
)


def _v31_grammar(calls: CallGrammar) -> str:
    return replace(_V31, fence="").grammar(calls)


def _v3_head(calls: CallGrammar, name: str) -> str:
    return f'"function" {calls.tag(_SEPARATOR)} {quoted(f"{name}\n{_FENCE}json\n")}'


def _v3_grammar(calls: CallGrammar) -> str:
    return replace(_V31, write_head=_v3_head, between="\n").grammar(calls)


def _detect_v31(template: str) -> bool:
    """Some templates write earlier calls, but declare no tools: for those, tools are written as text, with their own format."""
    return _SEPARATOR in template and _TOOLS.search(template) is not None


DEEPSEEK_V3 = ToolCallFormat(
    read=_V31.read,
    grammar=_v3_grammar,
    detect=lambda template: _detect_v31(template) and _FENCE in template,
    tags=(*_V31.tags, _SEPARATOR),
    turn_ends=("<｜end▁of▁sentence｜>",),
)
DEEPSEEK_V31 = replace(DEEPSEEK_V3, grammar=_v31_grammar, detect=_detect_v31)
