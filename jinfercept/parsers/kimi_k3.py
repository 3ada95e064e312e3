"""Kimi K3: `<|open|>call tool="name" index="1"<|sep|>`, an argument in tags of its own, all calls within `tools`.

Tags are made of three special tokens and text. The answer stands in `response`, and a turn in a message that the prompt opens.
"""

from dataclasses import replace

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.xml_calls import XmlTags, read_xml_calls
from jinfercept.parsers.xml_grammar import xml_grammar

_OPEN, _CLOSE, _SEP = _TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_TAGS = XmlTags(
    *(f'{_OPEN}call tool="', '"', f"{_CLOSE}call{_SEP}"),
    f'{_OPEN}argument key="',
    {f'" type="{kind}"{_SEP}': kind for kind in _TYPES} | {f'" type="integer"{_SEP}': "number", f'"{_SEP}': ""},
    f"{_CLOSE}argument{_SEP}",
    outer=(f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"),
    one_block=True,
    tokens=_TOKENS,
    json=f'{_OPEN}json type="object"{_SEP}',
)
_RESPONSE, _RESPONSE_END = f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"
_JSON_END, _MESSAGE_END = f"{_CLOSE}json{_SEP}", f"{_CLOSE}message{_SEP}"


def _grammar(calls: CallGrammar) -> str:
    """An empty response, which the prompt may have opened, and calls."""
    opening, closing, end = (calls.tag(tag, _TOKENS) for tag in (_RESPONSE, _RESPONSE_END, _MESSAGE_END))
    head_end = f"{quoted(' index="')} /[1-9][0-9]?/ {quoted('"')} {calls.tag(_SEP)}"
    return f"(({opening})? {closing})? {xml_grammar(calls, replace(_TAGS, head_end=head_end))} ({end})?"


KIMI_K3 = ToolCallFormat(
    read=lambda source: read_xml_calls(source, _TAGS),
    grammar=_grammar,
    detect=lambda template: _OPEN in template and _CLOSE in template,
    tags=(*_TAGS.tags, _JSON_END, _RESPONSE, _RESPONSE_END, _MESSAGE_END),
    turn_ends=("<|end_of_msg|>",),
    tokens=_TOKENS,
    frames_text=True,
)
