"""`/v1/responses/compact`: conversations in fewer tokens, with OpenAI's client."""

from typing import Any

import openai
import pytest

from jinfercept.serve.protocols.openai.compaction import INTRODUCTION, PROMPT
from tests.support.live_server import END, MODEL, Running
from tests.support.responses import ASKED, CALL, CHAT_PRICE, PRICE, answer, says
from tests.support.scripted_model import Scripted

SUMMARY = "A lamp costs 23: the price list says so."
FORMS = {"allowed_token_ids": [0], "logit_bias": {"0": 100}, "stop": "lamp", "structured_outputs": {"choice": ["No."]}}
"""Fields that are about answers, and of which a summary has nothing."""


def test_a_conversation_goes_on_from_its_summary(served: Running, scripted: Scripted) -> None:
    says(scripted, CALL + END, tools=[CHAT_PRICE])
    first = answer(served, tools=[PRICE])
    [call] = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "23"}
    function = {"name": "price", "arguments": call.arguments}
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.call_id, "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "name": "price", "content": "23"},
    ]
    says(scripted, SUMMARY + END, [*messages, {"role": "user", "content": PROMPT}])
    create: Any = served.client.responses.compact
    compacted = create(
        model=MODEL,
        input=[result],
        previous_response_id=first.id,
        extra_body={"temperature": 0, "tools": [PRICE]} | FORMS,
    )
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.output[0].content[0].text == ASKED[0]["content"]
    assert compacted.usage.output_tokens == len(SUMMARY) + 1
    assert SUMMARY not in compacted.output[1].encrypted_content
    summary = {"role": "user", "content": INTRODUCTION + SUMMARY}
    says(scripted, "It is 46." + END, [*ASKED, summary, {"role": "user", "content": "And two?"}])
    shown = [item.to_dict(warnings=False) for item in compacted.output]
    assert answer(served, [*shown, {"role": "user", "content": "And two?"}]).output_text == "It is 46."
    [user, _] = create(model=MODEL, previous_response_id=first.id, extra_body={"max_output_tokens": 9}).output
    assert user.content[0].text == ASKED[0]["content"]
    again = create(model=MODEL, input=shown, extra_body={"temperature": 0, "max_output_tokens": 9})
    assert [item.type for item in again.output] == ["message", "compaction"]


def test_what_cannot_be_compacted_is_refused_by_name(served: Running, scripted: Scripted) -> None:
    says(scripted, END, [*ASKED, {"role": "user", "content": PROMPT}])
    create: Any = served.client.responses.compact
    for fields, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ASKED, "extra_body": {"conversation": "conv_0"}}, "conversation"),
        ({"input": [*ASKED, {"type": "compaction_trigger"}]}, "input[1]"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "jinfercept-summary-1.!"}]},
            "input[0].encrypted_content",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create(**{"model": MODEL, "extra_body": {"temperature": 0}} | fields)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError, match="the model has written no summary") as empty:
        create(model=MODEL, input=ASKED, extra_body={"temperature": 0})
    assert empty.value.code == "empty_summary"


def test_a_conversation_of_the_server_is_compacted_from_its_items(served: Running, scripted: Scripted) -> None:
    says(scripted, SUMMARY + END, [*ASKED, {"role": "user", "content": PROMPT}])
    conversation = served.client.conversations.create(items=ASKED)
    create: Any = served.client.responses.compact
    body: Any = {"temperature": 0, "conversation": conversation.id}
    with pytest.raises(openai.BadRequestError, match="fix: give its items as input"):
        create(model=MODEL, input=[], extra_body=body)
    items: Any = [item.to_dict() for item in served.client.conversations.items.list(conversation.id)]
    compacted = create(model=MODEL, input=items, extra_body={"temperature": 0})
    assert [item.type for item in compacted.output] == ["message", "compaction"]
