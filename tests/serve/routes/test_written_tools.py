"""Tools with a template that knows none, and calls whose arguments are no object, in every dialect, streamed or not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.chat_templates import PLAIN, QWEN_ITEMS
from tests.support.live_server import END, Running, prompt_of
from tests.support.responses import CALL, CHAT_PRICE, PRICE
from tests.support.scripted_model import Make

ASKED: Any = [{"role": "user", "content": "How much is a lamp?"}]
ANTHROPIC: Any = {"name": "price", "description": "The price of an item.", "input_schema": PRICE["parameters"]}
DIALECTS = pytest.mark.parametrize(
    ("path", "tool", "field"),
    [
        ("/v1/chat/completions", CHAT_PRICE, "messages"),
        ("/v1/responses", PRICE, "input"),
        ("/v1/messages", ANTHROPIC, "messages"),
    ],
    ids=["chat", "responses", "messages"],
)
type Post = Callable[..., str]


@pytest.fixture
def post(served: Running) -> Post:
    """Sends a conversation; returns the body of the answer, or of the stream."""

    def post(path: str, tool: Any, **fields: Any) -> str:
        limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
        answer = served.http.post(path, json={"tools": [tool], "temperature": 0, limit: 400, **fields})
        assert answer.status_code == 200, answer.text
        return answer.text

    return post


@DIALECTS
def test_a_template_that_knows_no_tools_lets_the_model_answer_or_call(
    make_scripted: Make, post: Post, path: str, tool: Any, field: str
) -> None:
    scripted = make_scripted(PLAIN)
    before = prompt_of(scripted, ASKED, [CHAT_PRICE])
    assert json.dumps(CHAT_PRICE) in before
    scripted.follow(f"{before}Let me see.\n{CALL}{END}")
    called, streamed = (post(path, tool, stream=stream, **{field: ASKED}) for stream in (False, True))
    assert "Let me see." in called
    for body in (called, streamed):
        assert '"price"' in body
        assert any(kind in body for kind in ('"tool_calls"', '"function_call"', '"tool_use"'))
        assert "tool_call>" not in body
    scripted.follow(f"{before}It costs 23.{END}")
    assert "It costs 23." in post(path, tool, **{field: ASKED})


def history(path: str, answer: dict[str, Any]) -> list[Any]:
    """The conversation with an answer that calls, as its client sends it back with the results."""
    if path == "/v1/chat/completions":
        [choice] = answer["choices"]
        calls = choice["message"]["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "no object"} for call in calls]
        return [*ASKED, choice["message"], *results]
    if path == "/v1/responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "no object"} for call in calls
        ]
        return [*ASKED, *answer["output"], *results]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "no object"} for call in calls]
    return [*ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


@DIALECTS
def test_calls_whose_arguments_are_no_object_are_taken_back(
    make_scripted: Make, post: Post, path: str, tool: Any, field: str
) -> None:
    scripted = make_scripted(QWEN_ITEMS)
    before = prompt_of(scripted, ASKED, [CHAT_PRICE])
    calls = "\n".join(CALL.replace('{"item": "lamp"}', text) for text in ("[]", "null", '"R"', '{"a": ]', "7"))
    scripted.follow(f"{before}{calls}{END}")
    messages = history(path, json.loads(post(path, tool, **{field: ASKED})))
    assert str(messages).count("no object") >= 4
    scripted.follow()
    assert json.loads(post(path, tool, **{field: messages}))
