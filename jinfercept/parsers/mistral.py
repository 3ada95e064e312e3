"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since version 11 `[TOOL_CALLS]name[ARGS]{…}` for each."""

import re

from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.json_values import stream_arguments
from jinfercept.parsers.source import Source, Steps

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]")
_ID = re.compile(r"\w")


def mistral(source: Source) -> Steps[None]:
    """Reads a turn.

    In the newer form a call begins with the `{` of its arguments; a name without them is content, or dropped where the text
    ends with it. `[ARGS]` may be missing, `[CALL_ID]` and an id may stand before it. The older form: `read_calls`.
    """
    while mark := (yield from source.content()):
        if mark != TOOL_CALLS:
            continue
        start = source.at
        if (char := (yield from source.skip())) and char not in "[{":
            yield from _named_call(source, start)
        else:
            source.at = start
            yield from read_calls(source, tagged=True)


def _named_call(source: Source, start: int) -> Steps[None]:
    """Read `name[CALL_ID]id[ARGS]{…}`, or leave it to be read again from `start` on."""
    first = source.at
    name = yield from source.match(_NAME)
    yield from source.skip()
    call_id = ""
    if name and (yield from source.take(CALL_ID)):
        call_id = yield from source.match(_ID)
    if name:
        yield from source.take(ARGS)
    char = yield from source.skip()
    if name and char == "{":
        source.begin(name, first, call_id)
        if (yield from stream_arguments(source)):
            source.end()
    elif name and not char:
        source.drop()
    else:
        source.at = start
