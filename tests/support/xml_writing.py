"""Calls as the families write them whose calls are tags with plain text between them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

M3 = "]<]minimax[>["
XML = {
    "qwen3_coder": (
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>",
        "<parameter={}>{}</parameter>\n",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>',
        '<parameter name="{}">{}</parameter>\n',
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="{{}}">{{}}{M3}</invoke>\n{M3}</tool_call>',
        f"{M3}<{{0}}>{{1}}{M3}</{{0}}>",
    ),
    "glm45": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
}
"""By format, a call around its arguments, and an argument."""

ENDS = {name: argument.rsplit("}", 1)[-1].rstrip("\n") for name, (_, argument) in XML.items()} | {"minimax_m3": M3}
"""By format, the text that ends a value, or its beginning where the rest is the name of the argument."""


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
    written = (
        argument.format(key, value if isinstance(value, str) else dumped(value)) for key, value in values.items()
    )
    return call.format(tool, "".join(written))
