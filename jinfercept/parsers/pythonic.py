"""Llama 3.2 and 4, ToolACE: a list of Python calls, `[f(a=1), g(b="x")]`, where the turn begins."""

from jinfercept.parsers.llama import PYTHON_START, PYTHON_TAG
from jinfercept.parsers.python_calls import read_call_list
from jinfercept.parsers.source import Source, Steps


def pythonic(source: Source) -> Steps[None]:
    """Reads a turn.

    The list is handed over when it is complete, its arguments translated to JSON, one piece for each call. It is content as a
    whole if anything in it is no call, has a positional argument, or a value that JSON cannot say; so is a list that is cut
    off. After `<|python_start|>` (Llama 4) or `<|python_tag|>` (Llama 3.2) it may stand anywhere, and is dropped if cut off.
    """
    yield from read_call_list(source, tagged=False)
    while mark := (yield from source.content()):
        if mark in (PYTHON_START, PYTHON_TAG):
            yield from read_call_list(source, tagged=True)
