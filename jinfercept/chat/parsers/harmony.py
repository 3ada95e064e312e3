"""gpt-oss: a turn of messages. A call is `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`.

The recipient may stand before the channel, and the prompt has the first message's `<|start|>assistant`. A reasoning format
reads the reasoning, which is in the channel `analysis`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jinfercept.chat.parsers.json_calls import stream_call
from jinfercept.chat.parsers.source import Marks, Source, Steps
from jinfercept.chat.parsers.tool_call_format import NAME, CallGrammar, ToolCallFormat, quoted

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END = "<|message|>", "<|end|>"
_TURN_ENDS = ("<|call|>", "<|return|>")
_HEADER_ENDS = Marks((_MESSAGE, _END, _START, *_TURN_ENDS, "\n"))
_MESSAGE_ENDS = Marks((_END, _START, _CHANNEL, *_TURN_ENDS))
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/-]+)")
_HEADER_CHAR = re.compile(r"[^<\n]")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_ASSISTANT = "assistant"


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    A message to a tool is a call if it begins with `{`, is empty, or goes to a function. Otherwise, and if no tool is offered,
    it is dropped. Reasoning is dropped too, except at the beginning of the turn: there it is content unless a format took it.
    """
    begins = True  # nothing was read
    has_content = False  # a message was content
    addressed = yield from _is_addressed(source)
    while mark := (_START if addressed else (yield from source.read_content())):
        addressed = False
        first, begins = begins and mark == _CHANNEL, False
        if mark not in (_START, _CHANNEL):
            continue
        start = source.at
        if (yield from source.skip_until(_HEADER_ENDS)) != _MESSAGE:
            source.leave(start)
            continue
        header = mark + source.text[start : source.at]
        source.at += len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and source.tools != {}:
            yield from _read_call(source, recipient, start - len(mark) + recipient.start(2))
        elif recipient is not None or (_ANALYSIS.search(header) and not first):
            yield from source.skip_until(_MESSAGE_ENDS)
        elif has_content:
            source.begin_paragraph()
        has_content = has_content or recipient is None


def _is_addressed(source: Source) -> Steps[bool]:
    start = source.at
    # the recipient may come first: ` to=functions.name<|channel|>`
    yield from source.skip()
    addressed = False
    if (yield from source.take("to=")):
        yield from source.match(_HEADER_CHAR)
        addressed = bool((yield from source.take(_CHANNEL, _MESSAGE)))
    source.at = start
    return addressed


def _read_call(source: Source, recipient: re.Match[str], start: int) -> Steps[None]:
    name, char = recipient[2], (yield from source.skip())
    if char == "{" and name != _ASSISTANT:
        yield from stream_call(source, name, start, behind=" \t\r\n}")
        return
    if char == "<" and name != _ASSISTANT:
        source.write_call(name, start, "{}")
        return
    first = source.at
    mark = yield from source.skip_until(_MESSAGE_ENDS)
    if (recipient[1] or name in (source.tools or ())) and source.at > first and (mark or not source.cut):
        source.write_call(name, start, source.text[first : source.at].rstrip())


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        header = f"{quoted(f'commentary to=functions.{name} ')} {calls.tag(_CONSTRAIN)} {quoted('json')}"
        return f"{header} {calls.tag(_MESSAGE)} {calls.arguments(name, schema)}"

    return f'({calls.tag(_START)} "assistant")? {calls.tag(_CHANNEL)} {calls.each(write, NAME)}'


OPENAI = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _CHANNEL in template and f"{_CHANNEL}analysis{_MESSAGE}" in template,
    tags=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END),
    turn_ends=_TURN_ENDS,
    frames_text=True,
)
