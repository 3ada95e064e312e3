"""Calls as the families write them whose calls are JSON between tags: by the name of a format, a turn of some calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Called = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of tools and arguments."""


def _openai(calls: Called) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    )


def _listed(opening: str, closing: str) -> Callable[[Called], str]:
    def write(calls: Called) -> str:
        objects = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
        return f"{opening}[{', '.join(objects)}]{closing}"

    return write


def _minimax(calls: Called) -> str:
    objects = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
    return f"<tool_calls>\n{'\n'.join(objects)}\n</tool_calls><end_of_sentence>"


def _gemma4(calls: Called) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str) and '<|"|>' not in given:
            return f'<|"|>{given}<|"|>'
        return json.dumps(given)

    def members(values: Mapping[str, Any]) -> str:
        return ",".join(f"{key}:{value(given)}" for key, given in values.items())

    return "".join(f"<|tool_call>call:{name}{{{members(values)}}}<tool_call|>" for name, values in calls) + "<turn|>"


WRITTEN: Mapping[str, Callable[[Called], str]] = {
    "apriel": _listed("<tool_calls>", "</tool_calls>\n<|end|>"),
    "firefunction": _listed(" functools", "<|eot_id|>"),
    "gemma4": _gemma4,
    "granite": _listed("<|tool_call|>", "<|end_of_text|>"),
    "minimax": _minimax,
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL><SPECIAL_12>"),
    "openai": _openai,
}
