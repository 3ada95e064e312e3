"""Calls as the families write them whose calls are tags with plain text between them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

XML = {
    "qwen3_coder": (
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "glm45": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
}
"""By format, a call around its arguments, and an argument."""

ENDS = {name: argument.split("{}")[-1].rstrip("\n") for name, (_, argument) in XML.items()}
"""By format, the text that ends a value."""


def xml_call(
    name: str, tool: str, values: Mapping[str, Any], dumped: Callable[[Any], str] = json.dumps, *, close: bool = True
) -> str:
    """A call in a format of `XML`.

    Args:
        name: of the format.
        tool: its name.
        values: the arguments.
        dumped: writes those that are no strings.
        close: without, the closing tags of the values are missing.
    """
    call, argument = XML[name]
    if not close:
        argument = argument.replace(ENDS[name], "")
    texts = {key: value if isinstance(value, str) else dumped(value) for key, value in values.items()}
    return call.format(tool, "".join(argument.format(key, text) for key, text in texts.items()))
