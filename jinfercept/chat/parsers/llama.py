"""Llama 3: `{"name": …, "parameters": {…}}` at the beginning of a turn or after a tag; several are separated by `;`.

Smaller models write some prose first and leave the tag out. If the tools are known, `read_bare_calls` finds their calls.
"""

from jinfercept.chat.parsers.call_objects import BARE_OBJECTS, read_bare_calls, read_calls
from jinfercept.chat.parsers.python_calls import read_dotted_call
from jinfercept.chat.parsers.source import Source, Steps
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat

PYTHON_TAG = "<|python_tag|>"
LLAMA3_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_ROLE = "<|start_header_id|>"


def _read(source: Source) -> Steps[None]:
    # without a tag, an object is a call only if its keys are a call's, up to arguments that are an object
    yield from read_calls(source, tagged=False)
    while mark := (yield from source.read_content()):
        if mark == PYTHON_TAG:
            char = yield from source.skip()
            if char.isalpha():
                # a built-in tool, `brave_search.call(query="…")`; other code for the interpreter is content
                yield from read_dotted_call(source)
            else:
                yield from read_calls(source, tagged=True)
        elif mark in BARE_OBJECTS:
            yield from read_bare_calls(source, mark, BARE_OBJECTS[mark])


LLAMA3_JSON = ToolCallFormat(
    read=_read,
    grammar=lambda calls: calls.tagged(PYTHON_TAG, calls.several(calls.objects("parameters"), '"; "')),
    detect=lambda template: _ROLE in template and '"parameters"' in template,
    tags=(PYTHON_TAG,),
    turn_ends=LLAMA3_TURN_ENDS,
    openings=(*BARE_OBJECTS,),
)
