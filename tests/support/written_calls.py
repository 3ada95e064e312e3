"""Calls as the families write them whose calls are JSON between tags: by the name of a format, a turn of some calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Called = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of tools and arguments."""


def _deepseek_v3(calls: Called) -> str:
    opening = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    written = [f"{opening}{name}\n```json\n{json.dumps(values)}\n```<｜tool▁call▁end｜>" for name, values in calls]
    return f"<｜tool▁calls▁begin｜>{'\n'.join(written)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def _deepseek_v31(calls: Called) -> str:
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    written = [f"{opening}{name}<｜tool▁sep｜>{json.dumps(values)}{closing}" for name, values in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def _kimi_k2(calls: Called) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(values)}<|tool_call_end|>"
        for index, (name, values) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|><|im_end|>"


WRITTEN: Mapping[str, Callable[[Called], str]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi_k2,
}
