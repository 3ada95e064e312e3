"""Cases of the generator's own: questions about skills that no training dialogue has, with one right answer each."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from examples.tool_adapter.bfcl import Case
from examples.tool_adapter.dialogues import Dialogue, Mix, lessons
from examples.tool_adapter.lexicon import Lexicon

_MIX = Mix(several=0, incomplete=0, continued=0)


def held_out_cases(lexicon: Lexicon, count: int, seed: int) -> list[Case]:
    """Single calls, and questions that no tool answers."""
    made = (
        dialogue
        for lesson in lessons(lexicon, seed, examination=True, num_dialogues=2, mix=_MIX)
        for dialogue in lesson
    )
    return list(islice(_cases(made), count))


def _cases(dialogues: Iterator[Dialogue]) -> Iterator[Case]:
    for number, dialogue in enumerate(dialogues):
        *messages, answer = dialogue.messages
        functions = [tool["function"] for tool in dialogue.tools]
        yield Case(f"held_out_{number}", messages, functions, _answer(answer))


def _answer(message: dict[str, Any]) -> dict[str, dict[str, list[Any]]] | None:
    if not message.get("tool_calls"):
        return None
    ((function),) = (call["function"] for call in message["tool_calls"])
    arguments = json.loads(function["arguments"])
    return {function["name"]: {name: [_possible(value)] for name, value in arguments.items()}}


def _possible(value: Any) -> Any:
    """Of a record every field has a list of possible values."""
    return {name: [item] for name, item in value.items()} if isinstance(value, dict) else value
