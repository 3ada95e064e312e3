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
    calls = called(("1", "apply_patch", '{"input": "+a"}'), ("2", "local_shell", '{"command": ["ls"]}'))
    says(
        scripted, "Yes." + END, [QUESTION, calls, returned("1", "apply_patch", "ok"), returned("2", "local_shell", "a")]
    )
    action = {"type": "exec", "command": ["ls"], "env": {}}
    patch = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "+a", "status": "incomplete"}
    shell = {"type": "local_shell_call", "id": "lsh_1", "call_id": "2", "status": "incomplete", "action": action}
    patched = {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}
    listed = {"type": "local_shell_call_output", "id": "lsh_1", "output": "a"}
    assert answer(served, [QUESTION, patch, shell, patched, listed]).output_text == "Yes."


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
        ("3", "local_shell", '{"command": ["ls"], "timeout_ms": 5}'),
        text="Wait.",
        reasoning_content="Hm.",
    )
    results = [returned("1", "mcp__shop__price", "23"), returned("2", "apply_patch", "ok[input_image: it has no text]")]
    says(scripted, "Yes." + END, [QUESTION, calls, *results, returned("3", "local_shell", "a.txt")])
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
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "3",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "timeout_ms": 5, "env": {}, "user": None},
        },
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
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


def test_files_that_are_text_are_read_with_their_names(served: Running, scripted: Scripted) -> None:
    files = [
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,TGFtcHM6IDIz4oKs"},
        {"type": "input_file", "file_data": "data:application/json,%7B%7D"},
        {"type": "input_file", "filename": "b.txt", "file_data": "UGVuczogMw=="},
        {"type": "input_file", "content": "Nibs: 1"},
    ]
    content: Any = [{"type": "input_text", "text": "See"}, *files, {"type": "input_text", "text": "Why?"}]
    read = "See\n\na.txt\n\nLamps: 23€\n\n\n\n{}\n\n\n\nb.txt\n\nPens: 3\n\n\n\nNibs: 1\n\nWhy?"
    told = returned("1", "price", read)
    says(scripted, "Yes." + END, [{"role": "user", "content": read}, called(("1", "price", "{}")), told])
    call = {"type": "function_call", "call_id": "1", "name": "price", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": content}
    assert answer(served, [{"role": "user", "content": content}, call, output]).output_text == "Yes."


def test_hosted_tools_and_their_items_are_left_out(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END, tools=[CHAT_PRICE])
    inner = {"type": "namespace", "name": "n", "tools": [{"type": "mystery"}]}
    fields: dict[str, Any] = {"tools": [PRICE, {"type": "web_search"}, inner]}
    assert answer(served, [QUESTION, {"type": "web_search_call"}], **fields).output_text == "23."


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_with_truncation(
    served: Running, scripted: Scripted
) -> None:
    brief = {"role": "system", "content": "Be brief."}
    told = [{"role": role, "content": f"{place}" + "x" * 400} for place in range(4) for role in ("user", "assistant")]
    kept = [brief, *told[4:], QUESTION]
    says(scripted, "23." + END, kept)
    done = answer(served, [brief, *told, QUESTION], truncation="auto")
    assert (done.output_text, done.truncation) == ("23.", "auto")
    refused = served.http.post("/v1/responses", json={"input": [brief, *told, QUESTION]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
