"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, for every call, anywhere.

Qwen 2.5 Coder leaves the tags out: it writes the objects alone, in a code block, or within `<tools>`.
"""

from jinfercept.chat.parsers.json_calls import BARE_OBJECTS, read_bare_calls, read_calls
from jinfercept.chat.parsers.source import Source, Steps
from jinfercept.chat.parsers.tool_call_format import CallGrammar, Rules, ToolCallFormat

OPENING, CLOSING = "<tool_call>", "</tool_call>"
QWEN_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")
_ANSWER = rf"/(?s:.*)/ & ~/(?s:.*){OPENING}(?s:.*)/"
_BARE = {**BARE_OBJECTS, "<tools>": "</tools>"}
_OTHER_XML = ("<function=", "<arg_key>", "<parameter", "<invoke name=")  # other formats within these tags


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    Tags are never content outside a call's strings, but text between them that is no call is. The closing tag may be missing,
    and several objects may share a pair of tags (see `read_calls`). If the tools are known, an object that begins a line and
    names one of them is a call without tags.
    """
    while mark := (yield from source.read_content()):
        if mark == OPENING:
            yield from read_calls(source, tagged=True)
        elif mark in _BARE:
            yield from read_bare_calls(source, mark, _BARE[mark])


def _grammar(calls: CallGrammar) -> str:
    call = rf'{calls.tag(OPENING)} "\n"? {calls.objects("arguments")} "\n"? {calls.tag(CLOSING)}'
    return calls.several(call, r'"\n"?') + r' "\n"?'


def answer_or_calls(calls: CallGrammar) -> str:
    """Write the grammar of a turn that may call: any text without the opening tag, optionally followed by calls."""
    opening = calls.tag(OPENING)
    call = calls.rules.rule(rf'"\n"? {calls.objects("arguments")} "\n"? {calls.tag(CLOSING)}')
    answer = calls.rules.terminal(_ANSWER)
    first = calls.rules.begins(OPENING) if calls.token_of(OPENING) is None else f"{answer} {opening}"
    more = rf'("\n"? {opening} {call})*' if calls.parallel else ""
    return f'{answer} | {first} {call} {more} "\\n"?'


def answer_only(rules: Rules) -> str:
    """Write the grammar of a turn that may not call: text that neither contains the opening tag nor begins like it."""
    return rules.terminal(rf"{_ANSWER} & ~/\s*{OPENING[0]}(?s:.*)/")


HERMES = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: OPENING in template and not any(tag in template for tag in _OTHER_XML),
    tags=(OPENING, CLOSING),
    turn_ends=QWEN_TURN_ENDS,
    openings=tuple(_BARE),
)
