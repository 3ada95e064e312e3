"""The families whose calls are tags with plain text between them (`xml_calls`), each by its tags."""

from collections.abc import Callable

from jinfercept.parsers.call_grammars import CallGrammar
from jinfercept.parsers.hermes import CLOSING, OPENING, QWEN_TURN_ENDS
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.xml_calls import XmlTags, read_xml_calls
from jinfercept.parsers.xml_grammar import xml_grammar


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


def _deepseek(block: str, other: str) -> ToolCallFormat:
    def detect(template: str) -> bool:
        return _DSML in template and f"{block}>" in template

    tags = XmlTags(
        *(f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>", f'<{_DSML}parameter name="'),
        {'" string="true">': "string", '" string="false">': "other", '">': ""},
        f"</{_DSML}parameter>",
        outer=tuple(f"<{slash}{_DSML}{name}>" for name in (block, other) for slash in ("", "/")),
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
    XmlTags(
        *('<function name="', '">', "</function>"),
        *('<param name="', {'">': ""}, "</param>"),
        cdata=True,
    ),
    detect=lambda template: '<function name="' in template and '<param name="' in template,
    turn_ends=QWEN_TURN_ENDS,
)
"""`<function name="name"><param name="key">value</param>…</function>`, texts with markup in CDATA sections."""
