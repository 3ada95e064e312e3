"""A loop on LiteLLM. Arguments: the provider in front of the model's name, and whether to stream."""

# pyright: reportMissingImports=false
import json
import os
import sys
from typing import Any

import litellm
from price_tools import BRIEF, QUESTIONS, price, report, stock

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = {
    "price": (price, "The price of an item."),
    "stock": (stock, "How many there are."),
}


def run(call: Any) -> str:
    try:
        return TOOLS[call.function.name][0](**json.loads(call.function.arguments))
    except Exception as error:
        return f"error: {error}"


def turn(model: str, how: str, messages: list[Any]) -> tuple[Any, int | None]:
    declared = [
        {"type": "function", "function": {"name": name, "description": description, "parameters": ITEM}}
        for name, (_, description) in TOOLS.items()
    ]
    if how == "whole":
        return litellm.completion(model, messages, tools=declared).choices[0].message, None
    options = {"include_usage": True}
    chunks = list(litellm.completion(model, messages, tools=declared, stream=True, stream_options=options))
    built: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    assert built.usage.completion_tokens > 3
    return built.choices[0].message, sum(bool(chunk.choices[0].delta.content) for chunk in chunks if chunk.choices)


def main(provider: str, how: str) -> None:
    model = f"{provider}/{os.environ['MODEL']}"
    messages: list[Any] = [{"role": "system", "content": BRIEF}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message, pieces = turn(model, how, messages)
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [{"role": "tool", "tool_call_id": call.id, "content": run(call)} for call in message.tool_calls]
        report(message.content, pieces)


main(*sys.argv[1:])
