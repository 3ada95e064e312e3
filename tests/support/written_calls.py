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


def _openai(calls: Called) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    )


def _listed(opening: str, closing: str, arguments: str = "arguments", name: str = "name") -> Callable[[Called], str]:
    def write(calls: Called) -> str:
        objects = [json.dumps({name: called, arguments: values}) for called, values in calls]
        return f"{opening}[{', '.join(objects)}]{closing}"

    return write


def _lines(opening: str, closing: str) -> Callable[[Called], str]:
    def write(calls: Called) -> str:
        return opening + "\n".join(json.dumps({"name": name, "arguments": values}) for name, values in calls) + closing

    return write


def _apertus(calls: Called) -> str:
    return f"<|tools_prefix|>{json.dumps([{name: values} for name, values in calls])}<|tools_suffix|><|assistant_end|>"


def _functionary(calls: Called) -> str:
    return "".join(f"<function={name}>{json.dumps(values)}</function>" for name, values in calls) + "<|eot_id|>"


def _functionary_v32(calls: Called) -> str:
    return "".join(f">>>{name}\n{json.dumps(values)}" for name, values in calls) + "<|eot_id|>"


def _command_r(calls: Called) -> str:
    objects = [json.dumps({"tool_name": name, "parameters": values}, indent=4) for name, values in calls]
    return f"Action: ```json\n[\n{',\n'.join(objects)}\n]```<|END_OF_TURN_TOKEN|>"


def _lfm2(calls: Called) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|><|im_end|>"


def _solar(calls: Called) -> str:
    name_tag, arguments = "<|tool_call:name|>", "<|tool_call:args|>"
    written = [
        f"<|tool_call:begin|>a1b2c3d4e{index}{name_tag}{name}{arguments}{json.dumps(values)}<|tool_call:end|>"
        for index, (name, values) in enumerate(calls)
    ]
    return f"<|begin|>assistant<|tool_calls|>{''.join(written)}<|calls|>"


def _gemma4(calls: Called) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str) and '<|"|>' not in given:
            return f'<|"|>{given}<|"|>'
        return json.dumps(given)

    def members(values: Mapping[str, Any]) -> str:
        return ",".join(f"{key}:{value(given)}" for key, given in values.items())

    return "".join(f"<|tool_call>call:{name}{{{members(values)}}}<tool_call|>" for name, values in calls) + "<turn|>"


WRITTEN: Mapping[str, Callable[[Called], str]] = {
    "apertus": _apertus,
    "apriel": _listed("<tool_calls>", "</tool_calls>\n<|end|>"),
    "cohere_command4": _listed("<|START_ACTION|>", "<|END_ACTION|><|END_OF_TURN_TOKEN|>", "parameters", "tool_name"),
    "command_r": _command_r,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "firefunction": _listed(" functools", "<|eot_id|>"),
    "functionary_v31": _functionary,
    "functionary_v32": _functionary_v32,
    "gemma4": _gemma4,
    "gigachat3": _lines("<|function_call|>", "<|message_sep|>"),
    "granite": _listed("<|tool_call|>", "<|end_of_text|>"),
    "kimi_k2": _kimi_k2,
    "lfm2": _lfm2,
    "minimax": _lines("<tool_calls>\n", "\n</tool_calls><end_of_sentence>"),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL><SPECIAL_12>"),
    "openai": _openai,
    "solar_open": _solar,
}
