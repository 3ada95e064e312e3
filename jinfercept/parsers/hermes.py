"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, for every call, anywhere.

Qwen 2.5 Coder leaves the tags out: it writes the objects alone, in a code block, or within `<tools>`.
"""

from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.source import Source, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"
BARE = {"{": "", "```": "```", "<tools>": "</tools>"}
"""What a call without its tags may begin with, and what may close it."""


def hermes(source: Source) -> Steps[None]:
    """Reads a turn.

    Tags are never content, wherever they stand outside a call's strings; between them, what is no call is. The closing tag may
    be missing; several objects may share a pair of tags. Everything else: `read_calls`.

    Where the tools are known, an object at the beginning of a line that names one of them is a call without tags.
    """
    while mark := (yield from source.content()):
        if mark == OPENING:
            yield from read_calls(source, tagged=True)
        elif mark in BARE:
            yield from _read_bare(source, mark)


def _read_bare(source: Source, opening: str) -> Steps[None]:
    """Read calls without tags that begin here; what is none is content."""
    start = source.at
    if source.begins_line and source.tools:
        if opening != "{":
            source.at += len(opening)
            yield from source.take("json")
        if (yield from read_calls(source, tagged=False, names=source.tools)):
            if closing := BARE[opening]:
                yield from source.take(closing)
            return
    source.at = start
    source.say(len(opening))
