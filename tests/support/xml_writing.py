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
    **{
        name: (
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{{}}">\n{{}}</｜DSML｜invoke>\n</｜DSML｜{block}>',
            '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
        )
        for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "hy_v3": (
        "<tool_calls:opensource>\n<tool_call:opensource>{}<tool_sep:opensource>\n{}"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|><|close|>tools<|sep|>',
        '<|open|>argument key="{0}" type="{3}"<|sep|>{1}<|close|>argument<|sep|>',
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="{{}}">{{}}{M3}</invoke>\n{M3}</tool_call>',
        f"{M3}<{{0}}>{{1}}{M3}</{{0}}>",
    ),
    "muse": (
        '<atem:function_calls>\n<atem:invoke name="{}">\n{}</atem:invoke>\n</atem:function_calls>',
        '<atem:parameter name="{}">{}</atem:parameter>\n',
    ),
    "minicpm5": ('<function name="{}">{}</function>', '<param name="{}">{}</param>'),
    "glm45": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
}
"""By format, a call around its arguments, and an argument."""

ENDS = {name: argument.rsplit("}", 1)[-1].rstrip("\n") for name, (_, argument) in XML.items()} | {"minimax_m3": M3}
"""By format, the text that ends a value, or its beginning where the rest is the name of the argument."""
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


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
    return call.format(tool, "".join(_argument(argument, key, value, dumped) for key, value in values.items()))


def _argument(argument: str, key: str, value: Any, dumped: Callable[[Any], str]) -> str:
    kind = _KINDS.get(type(value), "null")
    is_text = kind == "string"
    return argument.format(key, value if is_text else dumped(value), str(is_text).lower(), kind)
