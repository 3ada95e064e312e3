"""Llama 3: `{"name": …, "parameters": {…}}` where the turn begins, or after `<|python_tag|>`; several separated by `;`."""

from jinfercept.intercept.call_objects import read_calls
from jinfercept.intercept.python_calls import read_dotted_call
from jinfercept.intercept.source import Source, Steps

PYTHON_TAG = "<|python_tag|>"


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
