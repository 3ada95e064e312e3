"""The families whose calls are tags with plain text between them (`xml_calls`), each by its tags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.hermes import CLOSING, OPENING, QWEN_TURN_ENDS
from jinfercept.parsers.lark import quoted
from jinfercept.parsers.source import Marks, Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.xml_calls import XmlTags, read_xml_call, read_xml_calls
from jinfercept.parsers.xml_grammar import XML_NAME, named_call, xml_grammar


def _format(tags: XmlTags, detect: Callable[[str], bool], turn_ends: tuple[str, ...]) -> ToolCallFormat:
    def read(source: Source) -> Steps[None]:
        return read_xml_calls(source, tags)

    def grammar(calls: CallGrammar) -> str:
        return xml_grammar(calls, tags)

    return ToolCallFormat(read, grammar, detect, tags=tags.tags, turn_ends=turn_ends, tokens=tags.tokens)


QWEN3_CODER = _format(
    XmlTags(
        *("<function=", ">", "</function>"),
        *("<parameter=", {">": ""}, "</parameter>"),
        padded=True,
        outer=(OPENING, CLOSING),
    ),
    detect=lambda template: OPENING in template and "<function=" in template,
    turn_ends=QWEN_TURN_ENDS,
)
"""`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, values on lines of their own."""

GLM45 = _format(
    XmlTags(
        *("<tool_call>", "", "</tool_call>"),
        *("<arg_key>", {"</arg_key>": ""}, "</arg_value>"),
        value_start="<arg_value>",
    ),
    detect=lambda template: OPENING in template and "<arg_key>" in template,
    turn_ends=("<|observation|>", "<|user|>", "<|role_end|>", "<|endoftext|>"),
)
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`, each tag on a line of its own or not."""

MINIMAX_M2 = _format(
    XmlTags(
        *('<invoke name="', '">', "</invoke>"),
        *('<parameter name="', {'">': ""}, "</parameter>"),
        outer=("<minimax:tool_call>", "</minimax:tool_call>"),
        one_block=True,
    ),
    detect=lambda template: "<minimax:tool_call>" in template,
    turn_ends=("[e~[",),
)
"""`<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter>…</invoke>…</minimax:tool_call>`."""

SEED_OSS = _format(
    XmlTags(
        *("<function=", ">", "</function>"),
        *("<parameter=", {">": ""}, "</parameter>"),
        outer=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    detect=lambda template: "<seed:tool_call>" in template,
    turn_ends=("<seed:eos>",),
)
"""`qwen3_coder` with values within their lines, and other tags around a call."""

_DSML = "｜DSML｜"


def _deepseek(block: str, alias: str) -> ToolCallFormat:
    def detect(template: str) -> bool:
        return _DSML in template and f"{block}>" in template

    tags = XmlTags(
        *(f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>", f'<{_DSML}parameter name="'),
        {'" string="true">': "string", '" string="false">': "other", '">': ""},
        f"</{_DSML}parameter>",
        outer=tuple(f"<{slash}{_DSML}{name}>" for name in (block, alias) for slash in ("", "/")),
        one_block=True,
        tokens=(_DSML,),
    )
    return _format(tags, detect, turn_ends=("<｜end▁of▁sentence｜>",))


DEEPSEEK_V32, DEEPSEEK_V4 = _deepseek("function_calls", "tool_calls"), _deepseek("tool_calls", "function_calls")
"""MiniMax's tags with `｜DSML｜` in them; each argument says whether it is a string."""

_HY = ":opensource>"
HY_V3 = _format(
    XmlTags(
        *(f"<tool_call{_HY}", f"<tool_sep{_HY}", f"</tool_call{_HY}"),
        *(f"<arg_key{_HY}", {f"</arg_key{_HY}": ""}, f"</arg_value{_HY}"),
        value_start=f"<arg_value{_HY}",
        outer=(f"<tool_calls{_HY}", f"</tool_calls{_HY}"),
        one_block=True,
    ),
    detect=lambda template: "<tool_sep" in template and ":opensource" in template,
    turn_ends=("<｜hy_eos:opensource｜>",),
)
"""GLM's tags with a suffix, and some more; one block of all calls."""

MINICPM5 = _format(
    XmlTags(*('<function name="', '">', "</function>"), *('<param name="', {'">': ""}, "</param>"), cdata=True),
    detect=lambda template: '<function name="' in template and '<param name="' in template,
    turn_ends=QWEN_TURN_ENDS,
)
"""`<function name="name"><param name="key">value</param>…</function>`, texts with markup in CDATA sections."""


# -- Kimi K3 ------------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE, _SEP = _TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_KIMI_K3 = XmlTags(
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
_JSON_END, _KIMI_MESSAGE_END = f"{_CLOSE}json{_SEP}", f"{_CLOSE}message{_SEP}"


def _kimi_k3_grammar(calls: CallGrammar) -> str:
    """An empty response, which the prompt may have opened, and calls."""
    opening, closing, end = (calls.tag(tag, _TOKENS) for tag in (_RESPONSE, _RESPONSE_END, _KIMI_MESSAGE_END))
    head_end = f"{quoted(' index="')} /[1-9][0-9]?/ {quoted('"')} {calls.tag(_SEP)}"
    return f"(({opening})? {closing})? {xml_grammar(calls, replace(_KIMI_K3, head_end=head_end))} ({end})?"


KIMI_K3 = ToolCallFormat(
    read=lambda source: read_xml_calls(source, _KIMI_K3),
    grammar=_kimi_k3_grammar,
    detect=lambda template: _OPEN in template and _CLOSE in template,
    tags=(*_KIMI_K3.tags, _JSON_END, _RESPONSE, _RESPONSE_END, _KIMI_MESSAGE_END),
    turn_ends=("<|end_of_msg|>",),
    tokens=_TOKENS,
    frames_text=True,
)
"""`<|open|>call tool="name" index="1"<|sep|>`, an argument in tags of its own, all calls within `tools`. Tags are made of three
special tokens and text. The answer stands in `response`, and a turn in a message that the prompt opens."""


# -- Muse ---------------------------------------------------------------------------------------------------------------

_START, _MESSAGE, _MESSAGE_END, _TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_NEXT = f"{_MESSAGE_END}{_START}assistant"
_RECIPIENT_CHAR = re.compile(r'[^<>\n"]')
_MESSAGE_ENDS = Marks((_MESSAGE_END, _TURN_END, _START))
_MUSE = XmlTags(
    *('<atem:invoke name="', '">', "</atem:invoke>"),
    *('<atem:parameter name="', {'">': ""}, "</atem:parameter>"),
    outer=("<atem:function_calls>", "</atem:function_calls>"),
)


def _read_muse(source: Source) -> Steps[None]:
    """Read a turn. Reasoning behind its first message is dropped; that before is content if no reasoning format took it."""
    yield from _skip_header(source)
    while mark := (yield from source.read_content()):
        if mark == _MUSE.function:
            yield from read_xml_call(source, _MUSE)
        elif mark == _START:
            yield from source.take("assistant")
            if (yield from _skip_header(source)) == "self":
                yield from source.skip_until(_MESSAGE_ENDS)
            else:
                source.begin_paragraph()


def _skip_header(source: Source) -> Steps[str]:
    """Pass over a message's recipient; returns it, "" if none stands here."""
    start = source.at
    yield from source.skip()
    if (yield from source.take("to=")):
        recipient = yield from source.match(_RECIPIENT_CHAR)
        if (yield from source.take(_MESSAGE)):
            return recipient
    source.at = start
    return ""


def _muse_grammar(calls: CallGrammar) -> str:
    opening, closing = map(calls.tag, _MUSE.outer)

    def write(name: str, schema: Mapping[str, Any]) -> str:
        head = f'{quoted(f" to={name}")} {calls.tag(_MESSAGE)} {opening} "\\n" {calls.tag(_MUSE.function)}'
        return f'{head} {named_call(calls, _MUSE, name, schema)} "\\n" {closing}'

    following = calls.tag(_NEXT, (_MESSAGE_END, _START))
    return f"({calls.tag(_START)} {quoted('assistant')})? {calls.several(calls.each(write, XML_NAME), following)}"


MUSE = ToolCallFormat(
    read=_read_muse,
    grammar=_muse_grammar,
    detect=lambda template: "<atem:invoke" in template,
    tags=(*_MUSE.tags, _START, _MESSAGE, _MESSAGE_END),
    turn_ends=(_TURN_END,),
    frames_text=True,
)
"""MiniMax M2's tags with `atem:` in them, each call in a message of its own, ` to=name<|message|>…<|eom|>`. The first message's
`<|start|>assistant` stands in the prompt. Reasoning, in a message to `self`, is a reasoning format's."""
