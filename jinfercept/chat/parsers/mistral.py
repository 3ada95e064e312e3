"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since version 11 `[TOOL_CALLS]name[ARGS]{…}` for each."""

import re
import uuid
from collections.abc import Mapping
from typing import Any

from jinfercept.chat.parsers.json_calls import read_calls, stream_call
from jinfercept.chat.parsers.source import Source, Steps
from jinfercept.chat.parsers.tool_call_format import NAME, NAME_CHAR, CallGrammar, ToolCallFormat, quoted

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_TURN_END = "</s>"
_ID = re.compile(r"\w")
_ID_FORM = "[a-zA-Z0-9]{9}"


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    In the newer form a call begins with the `{` of its arguments. `[ARGS]` may be missing, and `[CALL_ID]` with an id may stand
    before it. The name of an offered tool without arguments is a call if another call or the end of the turn follows; otherwise
    it is content, or dropped if the text ends with it. `read_calls` reads the older form.
    """
    while mark := (yield from source.read_content()):
        if mark != _TOOL_CALLS:
            continue
        start = source.at
        if (char := (yield from source.skip())) and char not in "[{":
            yield from _named_call(source, start)
        else:
            source.at = start
            yield from read_calls(source, tagged=True)


def _named_call(source: Source, start: int) -> Steps[None]:
    first = source.at
    name = yield from source.match(NAME_CHAR)
    yield from source.skip()
    call_id = ""
    if name and (yield from source.take(_CALL_ID)):
        call_id = yield from source.match(_ID)
    if name:
        yield from source.take(_ARGS)
    char = yield from source.skip()
    if name and char == "{":
        yield from stream_call(source, name, first, call_id)
    elif name in (source.tools or ()) and (yield from _ends_call(source)):
        source.write_call(name, first, "{}", call_id)
    elif name and not char:
        source.drop_rest()
    else:
        source.at = start


def _ends_call(source: Source) -> Steps[bool]:
    start = source.at
    ends = (yield from source.take(_TOOL_CALLS, _TURN_END)) or (not (yield from source.peek()) and not source.cut)
    source.at = start
    return bool(ends)


def _grammar(calls: CallGrammar) -> str:
    if _ARGS not in calls.template:
        objects = calls.several(calls.objects("arguments"), '", "')
        return f'{calls.tag(_TOOL_CALLS)} " "? "[" {objects} "]"'
    call_id = f"({calls.tag(_CALL_ID)} /{_ID_FORM}/)? " if _CALL_ID in calls.template else ""

    def write(name: str, schema: Mapping[str, Any]) -> str:
        return f"{quoted(name)} {call_id}{calls.tag(_ARGS)} {calls.arguments(name, schema)}"

    return calls.several(f"{calls.tag(_TOOL_CALLS)} {calls.each(write, NAME)}", "")


MISTRAL = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _TOOL_CALLS in template,
    tags=(_TOOL_CALLS, _CALL_ID, _ARGS),
    turn_ends=(_TURN_END,),
    new_id=lambda: uuid.uuid4().hex[:9],
    ids=_ID_FORM,
)
