"""An answer is what its stream amounts to, in each of OpenAI's dialects; for Anthropic's see `test_messages`."""

import json
import random
from typing import Any

import pytest

from tests.support.chat_templates import QWEN3
from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.scripted_model import Make

QUESTION: Any = [{"role": "user", "content": "How much is a lamp?"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
PEN = CALL.replace("lamp", "pen")
PRICE: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
CUSTOM = {"name": "patch", "description": "Edits."}
PATCH = CALL.replace("price", "patch").replace("item", "input")
PIECES = (
    "Let me see.",
    "Une clé à 日本.",
    " \n",
    "<think>\nA lamp.\n</think>\n\n",
    CALL,
    PEN,
    PATCH,
    CALL.replace('{"item": "lamp"}', "7"),
    CALL.replace("price", "undeclared"),
)
FIELDS: dict[str, Any] = {
    "chat/completions": {
        "tools": [PRICE, {"type": "custom", "custom": CUSTOM}],
        "messages": QUESTION,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    },
    "completions": {"logprobs": 1, "return_token_ids": True, "stop": ["é!"]},
    "responses": {
        "tools": [{"type": "function", **PRICE["function"]}, {"type": "custom", **CUSTOM}],
        "input": QUESTION,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
}
OWN = ("id", "call_id", "created", "created_at", "completed_at", "usage")
"""What two answers do not have in common."""


def generated(usage: Any) -> list[Any]:
    """The tokens of an answer, without those of its prompt, of which a second request computes fewer."""
    return [value for name, value in usage.items() if name.startswith(("completion", "output", "total"))]


def compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: compared(item) for key, item in value.items() if key not in OWN}
    return [*map(compared, value)] if isinstance(value, list) else value


def added(value: Any, delta: Any) -> Any:
    """A value with the next delta of it, as a client adds them: texts and lists are joined, calls by their index."""
    if isinstance(delta, dict) and isinstance(value, dict):
        return value | {key: added(value.get(key), item) for key, item in delta.items()}
    if isinstance(delta, list) and delta and isinstance(delta[0], dict) and "index" in delta[0]:
        calls = {call["index"]: call for call in value or ()}
        return [*(calls | {call["index"]: added(calls.get(call["index"]), call) for call in delta}).values()]
    both = type(value) is type(delta) and isinstance(delta, str | list)
    return value + delta if both else value if delta is None else delta


def folded(chunks: list[Any]) -> Any:
    """The only choice of a stream's chunks."""
    choice: Any = {}
    for chunk in chunks:
        for shown in chunk["choices"]:
            kind = {call.pop("type", None) for call in shown.get("delta", {}).get("tool_calls", ())}
            choice = added(choice, shown)
            if kind == {"custom"} or kind == {"function"}:
                choice["delta"]["tool_calls"][-1]["type"] = kind.pop()
    message = choice.pop("delta", None)
    if message is not None:
        calls = [{key: item for key, item in call.items() if key != "index"} for call in message.pop("tool_calls", ())]
        choice["message"] = message | ({"tool_calls": calls, "content": message["content"] or None} if calls else {})
    return choice


@pytest.mark.parametrize("path", FIELDS)
def test_an_answer_is_what_its_stream_amounts_to(served: Running, make_scripted: Make, path: str) -> None:
    scripted, rng = make_scripted(QWEN3), random.Random(7)
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    shown = [PRICE, {"type": "function", "function": CUSTOM | {"parameters": schema | {"additionalProperties": False}}}]
    prompt = prompt_of(scripted, QUESTION, shown)
    for case in range(10):
        written = "".join(rng.choices(PIECES, k=1 + case % 4))
        scripted.follow(prompt + written + END)
        most = "max_output_tokens" if path == "responses" else "max_tokens"
        length = max(1, len(scripted.tokenizer.encode(written)) + 1 - (case % 3 == 2) * rng.randrange(30))
        body = {"model": MODEL, "temperature": 0, most: length} | FIELDS[path]
        body |= {"prompt": prompt} if path == "completions" else {"parallel_tool_calls": case % 5 != 4}
        reply = served.http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 200, reply.text
        streams = {"stream": True} | ({} if path == "responses" else {"stream_options": {"include_usage": True}})
        lines = served.http.post(f"/v1/{path}", json=body | streams).text.splitlines()
        sent = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        events = [json.loads(line) for line in sent if line != "[DONE]"]
        if path == "responses":
            assert compared(reply.json()) == compared(events[-1]["response"])
            assert generated(reply.json()["usage"]) == generated(events[-1]["response"]["usage"])
        else:
            assert sent[-1] == "[DONE]"
            assert not any(event["usage"] for event in events[:-1])
            assert generated(reply.json()["usage"]) == generated(events[-1]["usage"])
            [whole] = reply.json()["choices"]
            assert compared(whole) == compared(folded(events)), written
