"""Calls as model families write them: by the name of a format, a turn of some calls; and one call as Qwen3-Coder writes it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

END = "\n</parameter>"
"""The text that ends a value."""


def xml_call(tool: str, values: Mapping[str, Any], dumped: Callable[[Any], str] = json.dumps, end: str = END) -> str:
    """A call.

    Args:
        tool: its name.
        values: the arguments.
        dumped: writes those that are no strings.
        end: the text that ends a value.
    """
    texts = {key: value if isinstance(value, str) else dumped(value) for key, value in values.items()}
    written = "".join(f"<parameter={key}>\n{text}{end}\n" for key, text in texts.items())
    return f"<tool_call>\n<function={tool}>\n{written}</function>\n</tool_call>"


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


def _glm(calls: Called) -> str:
    def write(name: str, values: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        written = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
        return f"<tool_call>{name}\n{''.join(written)}</tool_call>"

    return "\n".join(write(*call) for call in calls)


def _gemma(calls: Called) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(values)}<tool_call|>" for name, values in calls)


def _gemma_value(value: Any) -> str:
    """As the family's template writes it, but what it cannot express: texts with its quotes, and keys with punctuation."""
    if isinstance(value, Mapping):
        keys = {key: key if re.fullmatch(r"[\w.-]+", key) else json.dumps(key) for key in value}
        return "{" + ",".join(f"{keys[key]}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, str) and '<|"|>' not in value:
        return f'<|"|>{value}<|"|>'
    return json.dumps(value)


WRITTEN: Mapping[str, Callable[[Called], str]] = {
    "apriel": _listed("<tool_calls>", "</tool_calls>\n<|end|>"),
    "firefunction": _listed(" functools", "<|eot_id|>"),
    "gemma4": _gemma,
    "glm45": _glm,
    "granite": _listed("<|tool_call|>", "<|end_of_text|>"),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL><SPECIAL_12>"),
    "openai": _openai,
    "qwen3_coder": lambda calls: "\n".join(xml_call(*call) for call in calls),
}
