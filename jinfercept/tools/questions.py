"""Questions to models and people: the default schema of the arguments, and the conversation made of them."""

import json
from collections.abc import Mapping
from typing import Any

QUESTION = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "with everything that is needed to answer it"}},
    "required": ["question"],
}
"""Schema of the arguments of a tool that declares none."""


def conversation(system: str | None, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages for a model: the question is a single text argument, or all arguments as JSON."""
    values = list(arguments.values())
    alone = len(values) == 1 and isinstance(values[0], str)
    question = values[0] if alone else json.dumps(dict(arguments), ensure_ascii=False)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]
