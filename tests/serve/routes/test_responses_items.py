"""Items of `/v1/responses` in every order that clients send them, and what the model reads of them."""

from typing import Any

import pytest

from jinfercept.chat.futures import placeholder
from tests.support.live_server import END, Running
from tests.support.responses import ASKED, CALL, CHAT_PRICE, PRICE, answer, says
from tests.support.scripted_model import Scripted

QUESTION: Any = ASKED[0]


def called(*calls: tuple[str, str, str], text: str = "", **fields: Any) -> dict[str, Any]:
    """A turn of the assistant with calls: id, name and arguments."""
    functions = [{"id": name, "function": {"name": tool, "arguments": given}} for name, tool, given in calls]
    return {"role": "assistant", "content": text, "tool_calls": functions} | fields


def returned(call_id: str, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


def test_a_call_that_was_cut_off_is_read_with_its_result(served: Running, scripted: Scripted) -> None:
    """Whether the client sends the call or the server has stored it. A call without a result is left out."""
    given = '{"item": "la'
    says(scripted, CALL + END, tools=[CHAT_PRICE])
    cut = answer(served, tools=[PRICE], max_output_tokens=CALL.index(given) + len(given))
    [call] = cut.output
    assert (call.status, call.arguments) == ("incomplete", given)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "error: this is no JSON"}
    told = returned(call.call_id, "price", "error: this is no JSON")
    says(scripted, "Yes." + END, [QUESTION, called((call.call_id, "price", given)), told], tools=[CHAT_PRICE])
    lost = call.to_dict() | {"call_id": "lost", "id": "fc_lost"}
    assert answer(served, [result], previous_response_id=cut.id, tools=[PRICE]).output_text == "Yes."
    assert answer(served, [QUESTION, call.to_dict(), lost, result], tools=[PRICE]).output_text == "Yes."


def test_incomplete_calls_of_every_type_are_read_with_their_results(served: Running, scripted: Scripted) -> None:
    calls = called(("1", "apply_patch", '{"input": "+a"}'), ("2", "tool_search", '{"query": "a"}'))
    results = [returned("1", "apply_patch", "ok"), returned("2", "tool_search", "no tools found")]
    says(scripted, "Yes." + END, [QUESTION, calls, *results])
    patch = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "+a", "status": "incomplete"}
    search = {"type": "tool_search_call", "call_id": "2", "status": "incomplete", "arguments": {"query": "a"}}
    search["execution"] = "client"
    patched = {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}
    found = {"type": "tool_search_output", "execution": "client", "call_id": "2", "tools": []}
    assert answer(served, [QUESTION, patch, search, patched, found]).output_text == "Yes."


@pytest.mark.parametrize("read_after", [0, 1])
def test_the_result_of_a_future_is_read_once_whatever_the_last_item_is(
    served: Running, scripted: Scripted, read_after: int
) -> None:
    note = {"round": 0, "call_id": "1", "future": "price_1", "read_after": read_after}
    call = {"type": "mcp_call", "name": "price", "arguments": "{}", "output": "23", "jinfercept": note}
    begun = [QUESTION, called(("1", "price", "{}")), returned("1", "price", placeholder("price_1"))]
    rest = [{"role": "assistant", "content": "It costs 23."}, returned("1", "price", "23")]
    says(scripted, "Yes." + END, [*begun, *(rest if read_after else reversed(rest))])
    assert answer(served, [QUESTION, call, {"role": "assistant", "content": "It costs 23."}]).output_text == "Yes."


def test_calls_of_all_types_are_read_with_reasoning_and_text_between_them(served: Running, scripted: Scripted) -> None:
    calls = called(
        ("1", "mcp__shop__price", '{"item": "lamp"}'),
        ("2", "apply_patch", '{"input": "+a"}'),
        text="Wait.",
        reasoning_content="Hm.",
    )
    results = [returned("1", "mcp__shop__price", "23"), returned("2", "apply_patch", "ok[input_image: it has no text]")]
    says(scripted, "Yes." + END, [QUESTION, calls, *results])
    text = {"type": "input_text", "text": "ok"}
    items = [
        QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "reasoning", "summary": "short", "content": [{"type": "text", "text": "Hm."}, {"type": "odd"}, 3]},
        {
            "type": "function_call",
            "call_id": "1",
            "namespace": "mcp__shop",
            "name": "price",
            "arguments": '{"item": "lamp"}',
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "lamp"}},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "+a", "status": "completed"},
        {"role": "assistant", "content": "Wait."},
        {"type": "reasoning", "summary": None, "content": []},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [text, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "shop", "tools": []},
        {"type": "function_call_output", "call_id": "1", "output": [text | {"text": "2"}, text | {"text": "3"}]},
    ]
    first = answer(served, items)
    assert first.output_text == "Yes."
    stored = served.client.responses.input_items.list(first.id, order="asc", limit=100).data
    kinds = [
        kind for item in items[1:] if (kind := item.get("type", "message")) not in ("web_search_call", "mcp_list_tools")
    ]
    assert [item.type for item in stored] == ["message", *kinds]


def test_hosted_tools_and_their_items_are_left_out(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END, tools=[CHAT_PRICE])
    inner = {"type": "namespace", "name": "n", "tools": [{"type": "mystery"}]}
    fields: dict[str, Any] = {"tools": [PRICE, {"type": "web_search"}, inner]}
    assert answer(served, [QUESTION, {"type": "web_search_call"}], **fields).output_text == "23."
