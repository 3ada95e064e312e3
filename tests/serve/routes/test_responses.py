"""`/v1/responses` with OpenAI's client: answers, conversations, tools, structured outputs."""

import json
from typing import Any

import openai
import pytest

from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED, CALL, CHAT_PRICE, PRICE, QUESTION, answer, says
from tests.support.scripted_model import Scripted


def test_a_question_is_answered(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    done = answer(served, metadata={"a": "b"}, user="me")
    assert done.id.startswith("resp_")
    assert (done.object, done.model, done.status, done.error) == ("response", MODEL, "completed", None)
    assert (done.metadata, done.user, done.store, done.temperature) == ({"a": "b"}, "me", True, 0)
    [item] = done.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert done.output_text == item.content[0].text == "It costs 23."
    assert done.usage.input_tokens == len(scripted.tokenizer.encode(prompt_of(scripted, ASKED)))
    assert done.usage.output_tokens == len("It costs 23.") + 1
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.usage.input_tokens_details.cached_tokens == 0
    assert done.usage.output_tokens_details.reasoning_tokens == 0


def test_a_follow_up_says_only_what_is_new_and_finds_its_context(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    first = answer(served)
    longer = [*ASKED, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "And two?"}]
    says(scripted, "46." + END, longer)
    second = answer(served, "And two?", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("46.", first.id)
    all_of_it = first.usage.total_tokens  # but for the last token, of which KV may not have been computed
    assert second.usage.input_tokens_details.cached_tokens in (all_of_it - 1, all_of_it)
    longest = [*longer, {"role": "assistant", "content": "46."}, {"role": "user", "content": "Thanks."}]
    says(scripted, "Bye." + END, longest)
    assert answer(served, "Thanks.", previous_response_id=second.id).output_text == "Bye."


def test_two_follow_ups_of_one_response_both_go_on_from_it(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    first = answer(served)
    for question, text in (("And two?", "46."), ("In red?", "24.")):
        longer = [*ASKED, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": question}]
        says(scripted, text + END, longer)
        branch = answer(served, question, previous_response_id=first.id)
        assert branch.output_text == text
        assert branch.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens // 16 * 16


def test_instructions_come_first_and_are_not_carried_over(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END, [{"role": "system", "content": "Be brief."}, *ASKED])
    first = answer(served, instructions="Be brief.")
    assert (first.output_text, first.instructions) == ("23.", "Be brief.")
    longer = [*ASKED, {"role": "assistant", "content": "23."}, {"role": "user", "content": "Why?"}]
    says(scripted, "Because." + END, longer)
    assert answer(served, "Why?", previous_response_id=first.id).output_text == "Because."


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(served: Running, scripted: Scripted) -> None:
    count = served.client.responses.input_tokens.count
    says(scripted, "It costs 23." + END, tools=[CHAT_PRICE])
    first = answer(served, tools=[PRICE])
    counted = count(model=MODEL, input=QUESTION, tools=[PRICE])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    longer = [*ASKED, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "And two?"}]
    expected = len(scripted.tokenizer.encode(prompt_of(scripted, longer)))
    assert count(input="And two?", previous_response_id=first.id).input_tokens == expected
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        count(input="And two?", previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match="conversation cannot be counted: its last response has usage"):
        count(input="And two?", conversation="conv_1")


def test_the_client_runs_a_tool_and_hands_in_its_result(served: Running, scripted: Scripted) -> None:
    says(scripted, "Let me see.\n" + CALL + END, tools=[CHAT_PRICE])
    first = answer(served, tools=[PRICE])
    text, call = first.output
    assert (first.status, text.content[0].text) == ("completed", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "price", {"item": "lamp"})
    function = {"name": "price", "arguments": call.arguments}
    chat = [
        *ASKED,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "price", "content": "23"},
    ]
    says(scripted, "It costs 23." + END, chat, tools=[CHAT_PRICE])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "23"}
    second = answer(served, [result], tools=[PRICE], previous_response_id=first.id)
    assert second.output_text == "It costs 23."
    assert second.usage.input_tokens_details.cached_tokens > 100
    # without the store: the client hands in all of it again
    items = [*ASKED, *(item.model_dump(exclude_none=True) for item in first.output), result]
    third = answer(served, items, tools=[PRICE], store=False, include=["reasoning.encrypted_content"])
    assert third.output_text == "It costs 23."
    assert third.usage.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve(third.id)


def test_an_answer_that_was_cut_off_says_so_and_can_be_gone_on_from(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    cut = answer(served, max_output_tokens=8)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output_text, cut.output[0].status) == ("It costs", "incomplete")
    chat = [*ASKED, {"role": "assistant", "content": "It costs"}, {"role": "user", "content": "Yes?"}]
    says(scripted, "23." + END, chat)
    assert answer(served, "Yes?", previous_response_id=cut.id).output_text == "23."
    says(scripted, CALL + END, tools=[CHAT_PRICE])
    cut = answer(served, tools=[PRICE], max_output_tokens=len(CALL) - 20)
    [call] = cut.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    chat = [*ASKED, {"role": "user", "content": "Yes?"}]
    says(scripted, "No." + END, chat, tools=[CHAT_PRICE])
    assert answer(served, "Yes?", previous_response_id=cut.id, tools=[PRICE]).output_text == "No."


def test_log_probabilities_come_with_the_text(served: Running, scripted: Scripted) -> None:
    says(scripted, "23" + END)
    done = answer(served, include=["message.output_text.logprobs"], top_logprobs=2)
    reported = done.output[0].content[0].logprobs
    assert [logprob.token for logprob in reported] == ["2", "3"]
    assert all(len(logprob.top_logprobs) == 2 and logprob.logprob > -1e-3 for logprob in reported)
    assert answer(served).output[0].content[0].logprobs == []


def test_items_of_every_kind_are_read(served: Running, scripted: Scripted) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hm. No."},
        {"role": "user", "content": "Well?"},
    ]
    says(scripted, "Yes." + END, chat)
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("Hi ", "there")]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "?"}],
            "encrypted_content": "x",
        },
        {
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Hm. ", "annotations": []},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    done = answer(served, items)
    assert done.output_text == "Yes."
    reference = {"type": "item_reference", "id": done.output[0].id}
    says(scripted, "Good." + END, [*chat, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}])
    assert answer(served, [*items, reference, {"role": "user", "content": "So?"}]).output_text == "Good."


PDF = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [ASKED[0], {"type": "compaction_trigger"}]}, "input[1]"),
        ({"input": [ASKED[0], {"type": "compaction", "encrypted_content": "x"}]}, "input[1].encrypted_content"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9}]}, "context_management"),
        ({"input": [ASKED[0], {"type": "from_the_future", "text": "Hi"}]}, "input[1]"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "23"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [PDF]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": [PDF]}]}, "input[0].output[0]"),
        ({"input": "x" * 3000}, "input"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"truncation": "auto", "input": "x" * 3000}, "input"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"tools": [{"name": "price"}]}, "tools[0]"),
        ({"tools": [PRICE, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [PRICE], "tool_choice": {"type": "allowed_tools", "tools": [PRICE | {"name": "cost"}]}},
            "tool_choice",
        ),
        ({"tools": [PRICE], "tool_choice": {"type": "function", "name": "cost"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_a_field_that_is_wrong_is_named(served: Running, fields: dict[str, Any], param: str) -> None:
    refused = served.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 8} | fields)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param, error
    assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
    if param == "input[1]":
        assert f"items of type {fields['input'][1]['type']} are not supported" in error["message"]
