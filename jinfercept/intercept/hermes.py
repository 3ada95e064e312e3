"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, for every call, anywhere."""

from jinfercept.intercept.call_objects import read_calls
from jinfercept.intercept.source import Source, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def hermes(source: Source) -> Steps[None]:
    """Reads a turn.

    Tags are never content, wherever they stand outside a call's strings; between them, what is no call is. The closing tag may
    be missing; several objects may share a pair of tags. Everything else: `read_calls`.
    """
    while mark := (yield from source.content()):
        if mark == OPENING:
            yield from read_calls(source, tagged=True)
