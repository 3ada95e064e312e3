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

    return ToolCallFormat(read, grammar, detect, tags=tags.tags, turn_ends=turn_ends)


QWEN3_CODER = _format(
    XmlTags(
        *("<function=", ">", "</function>"),
        *("<parameter=", ">", "</parameter>"),
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
        *("<arg_key>", "</arg_key>", "</arg_value>"),
        value_start="<arg_value>",
    ),
    detect=lambda template: OPENING in template and "<arg_key>" in template,
    turn_ends=("<|observation|>", "<|user|>", "<|role_end|>", "<|endoftext|>"),
)
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`, each tag on a line of its own or not."""

MINIMAX_M2 = _format(
    XmlTags(
        *('<invoke name="', '">', "</invoke>"),
        *('<parameter name="', '">', "</parameter>"),
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
        *("<parameter=", ">", "</parameter>"),
        outer=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    detect=lambda template: "<seed:tool_call>" in template,
    turn_ends=("<seed:eos>",),
)
"""`qwen3_coder` with values within their lines, and other tags around a call."""
