"""Custom tools, whose input is a text: the model knows them as functions with that text as their only argument."""

import json
from collections.abc import Mapping
from typing import Any

CUSTOM_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def with_grammar(description: Any, syntax: Any, definition: Any) -> Any:
    """The description of a custom tool, with the grammar of its input: the model reads it, and it is not enforced."""
    if not definition:
        return description
    grammar = f"The input follows this {syntax or ''} grammar:".replace("  ", " ")
    return "\n\n".join(filter(None, [description, f"{grammar}\n{definition}"]))


def custom_input(arguments: str) -> str:
    """The input in the arguments of a call; all that the model wrote if they have none."""
    try:
        written = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return written if isinstance(written, str) else arguments


def declared(tool: Any) -> Any:
    """A tool of a chat, the declaration of a custom one as that of a function."""
    if (custom := _custom(tool)) is None:
        return tool
    form = custom.get("format")
    grammar = form.get("grammar") if isinstance(form, dict) else None
    description, (syntax, definition) = custom.get("description"), _texts(grammar, "syntax", "definition")
    if isinstance(description, str | None):
        description = with_grammar(description, syntax, definition)
    function = {"name": custom.get("name"), "description": description, "parameters": CUSTOM_INPUT}
    return {"type": "custom", "function": function}


def called(call: Any) -> Any:
    """A call in a message, that of a custom tool as one of a function. One without a type is of a function."""
    if (custom := _custom(call)) is None:
        is_bare = isinstance(call, dict) and call.get("type") in (None, "")
        return {**call, "type": "function"} if is_bare else call
    [text] = _texts(custom, "input")
    function = {"name": custom.get("name"), "arguments": json.dumps({"input": text}, ensure_ascii=False)}
    return {"id": call.get("id"), "function": function}


def chosen(choice: Any) -> Any:
    """A tool that has to be called, a custom one as a function."""
    return choice if (custom := _custom(choice)) is None else {"type": "function", "function": custom}


def _custom(part: Any) -> dict[str, Any] | None:
    """What a part of a body has of a custom tool."""
    custom = part.get("custom") if isinstance(part, dict) and part.get("type") == "custom" else None
    return custom if isinstance(custom, dict) else None


def _texts(part: Any, *names: str) -> list[str]:
    values = [part.get(name) if isinstance(part, dict) else None for name in names]
    return [value if isinstance(value, str) else "" for value in values]
