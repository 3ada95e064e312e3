"""Llama 3 and 4: `{"name": …, "parameters": {…}}` where the turn begins, or after a tag; several separated by `;`."""

from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.python_calls import read_dotted_call
from jinfercept.parsers.source import Source, Steps

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def llama3_json(source: Source) -> Steps[None]:
    """Reads a turn.

    Where no tag stands before, only an object whose keys are a call's, up to arguments that are an object, is a call. After the
    tag a call of a built-in tool may stand too, `brave_search.call(query="…")`; other code for the interpreter is content.
    """
    yield from read_calls(source, tagged=False)
    while mark := (yield from source.content()):
        if mark == PYTHON_TAG:
            char = yield from source.skip()
            if char.isalpha():
                yield from read_dotted_call(source)
            else:
                yield from read_calls(source, tagged=True)


def llama4_json(source: Source) -> Steps[None]:
    """Reads a turn. As Llama 3's; the tag is `<|python_start|>`, and objects may also stand behind `<|python_end|>`."""
    yield from read_calls(source, tagged=False)
    while mark := (yield from source.content()):
        if mark in (PYTHON_START, PYTHON_TAG, PYTHON_END):
            yield from read_calls(source, tagged=mark != PYTHON_END)
