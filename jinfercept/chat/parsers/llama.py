"""Llama 3: `{"name": …, "parameters": {…}}`, or a list of Python calls, `[f(a=1), g(b="x")]` (Llama 3.2, ToolACE).

Calls stand at the beginning of a turn or after a tag; several objects are separated by `;`. Smaller models write some prose
first and leave the tag out. If the tools are known, such calls are found at the beginning of a line.
"""

import re
from collections.abc import Collection

from jinfercept.chat.parsers.json_calls import BARE_OBJECTS, read_bare_calls, read_calls
from jinfercept.chat.parsers.python_calls import PythonCall, read_call, read_dotted_call, write_calls
from jinfercept.chat.parsers.source import Source, Steps
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat

_PYTHON_TAG = "<|python_tag|>"
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_ROLE = "<|start_header_id|>"


def _read_json(source: Source) -> Steps[None]:
    # without a tag, an object is a call only if its keys are a call's, up to arguments that are an object
    yield from read_calls(source, tagged=False)
    while mark := (yield from source.read_content()):
        if mark == _PYTHON_TAG:
            char = yield from source.skip()
            if char.isalpha():
                # a built-in tool, `brave_search.call(query="…")`; other code for the interpreter is content
                yield from read_dotted_call(source)
            else:
                yield from read_calls(source, tagged=True)
        elif mark in BARE_OBJECTS:
            yield from read_bare_calls(source, mark, BARE_OBJECTS[mark])


LLAMA3_JSON = ToolCallFormat(
    read=_read_json,
    grammar=lambda calls: calls.tagged(_PYTHON_TAG, calls.several(calls.objects("parameters"), '"; "')),
    detect=lambda template: _ROLE in template and '"parameters"' in template,
    tags=(_PYTHON_TAG,),
    turn_ends=_TURN_ENDS,
    openings=(*BARE_OBJECTS,),
)


_ASKS = re.compile(r"\[func(_name)?1\(")
_LLAMA4_ROLE = "<|header_start|>"  # Llama 4 has other tags
_BARE_LISTS = ("[", "```")
"""Texts that a list of calls without a tag may begin with."""


def _read_python(source: Source) -> Steps[None]:
    """Read a turn.

    The list becomes calls when it is complete, each with its arguments as one piece of JSON. If any item is no call, has a
    positional argument, or a value that JSON cannot express, the whole list is content; so is a list that is cut off. After a
    tag a list may stand anywhere, and is dropped if cut off. Calls may also be JSON objects, as forced calls are. If the tools
    are known, a list of only their calls may also begin a line, or stand in a code block.
    """
    whole = True  # no list was cut off
    yield from read_calls(source, tagged=False)
    yield from _read_list(source, tagged=False)
    while mark := (yield from source.read_content()):
        if mark == _PYTHON_TAG:
            yield from _read_tagged(source)
        elif mark in _BARE_LISTS and whole:
            whole = yield from _read_bare_list(source, mark)
        elif mark in _BARE_LISTS:
            source.add_content(len(mark))


def _read_bare_list(source: Source, opening: str) -> Steps[bool]:
    start = source.at
    if source.begins_line and source.tools:
        if opening != "[":
            source.at += len(opening)
            yield from source.take("python", "tool_code")
            yield from source.skip()
        if (yield from source.peek()) == "[" and (calls := (yield from _read_calls(source, source.tools))):
            write_calls(source, calls)
            if opening != "[" and (yield from source.skip()) == "`":
                yield from source.take(opening)
            return True
    cut_off = source.ended and source.at == len(source.text)
    source.at = start
    source.add_content(len(opening))
    return not cut_off


def _read_tagged(source: Source) -> Steps[None]:
    start = source.at
    if (char := (yield from source.skip())) == "[":
        source.at += 1
        char = yield from source.skip()
    source.at = start
    if char == "{":
        yield from read_calls(source, tagged=True)
    else:
        yield from _read_list(source, tagged=True)


def _read_list(source: Source, tagged: bool) -> Steps[None]:
    start = source.at
    if (yield from source.skip()) == "[":
        calls = yield from _read_calls(source)
        if calls or (calls is not None and tagged):
            write_calls(source, calls)
            return
    if tagged:
        source.leave(start)
    else:
        source.at = start


def _read_calls(source: Source, names: Collection[str] | None = None) -> Steps[list[PythonCall] | None]:
    source.at += 1
    calls: list[PythonCall] = []
    while (yield from source.skip()) != "]":
        call = yield from read_call(source, names)
        if call is None:
            return None
        calls.append(call)
        char = yield from source.skip()
        if char == ",":
            source.at += 1
        elif char != "]":
            return None
    source.at += 1
    return calls


PYTHONIC = ToolCallFormat(
    read=_read_python,
    grammar=LLAMA3_JSON.grammar,
    detect=lambda template: bool(_ASKS.search(template)) and _LLAMA4_ROLE not in template,
    tags=(_PYTHON_TAG,),
    turn_ends=_TURN_ENDS,
    openings=_BARE_LISTS,
)
