"""What is asked of whoever answers in words, a model or a person."""

import json
from collections.abc import Mapping
from typing import Any

QUESTION = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "with everything that is needed to answer it"}},
    "required": ["question"],
}
"""The arguments, unless a tool declares its own."""


def conversation(system: str | None, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a model reads: a single text as it is, other arguments as JSON."""
    values = list(arguments.values())
    alone = len(values) == 1 and isinstance(values[0], str)
    question = values[0] if alone else json.dumps(dict(arguments), ensure_ascii=False)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]
