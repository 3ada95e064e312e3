"""Calls as Qwen3-Coder writes them: tags with plain text between them."""

import json
from collections.abc import Callable, Mapping
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
