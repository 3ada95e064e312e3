"""Errors of `/v1/messages`: wrong and hostile requests get an answer in Anthropic's shape, and keys share nothing."""

from typing import Any

import anthropic as library
import pytest

from tests.support.anthropic_client import ASKED, MESSAGES, PRICE, create, failed, post
from tests.support.live_server import END, MODEL, Running, running
from tests.support.responses import says
from tests.support.scripted_model import Scripted
from tests.support.served import JSON

COUNT = f"{MESSAGES}/count_tokens"
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
NOUGHT: Any = None
for _ in range(150):
    NOUGHT = {"a": [NOUGHT]}


def message_of(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "role"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "It"}]}, "end with a message of the user"),
        (message_of({"type": "image", "source": {"type": "url", "url": "http://x"}}), "image blocks are not supported"),
        (message_of({"type": "document", "source": {}}), "source"),
        (message_of({"type": "document", "source": PDF}), "whose source is base64 are not supported"),
        (message_of({"type": "document", "source": {"type": "url", "url": "http://x"}}), "whose source is url"),
        (message_of({"type": "document", "source": {"type": "text"}}), "all they have is text"),
        (
            message_of(
                {"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": PDF}]}}
            ),
            "all they have is text",
        ),
        (message_of({"type": "search_result", "content": 5}), "all they have is text"),
        (message_of({"type": "document", "source": {"type": ["text"]}}), "whose source is ['text']"),
        (message_of({"type": "search_result", "title": "Lamps"}), "all they have is text"),
        (
            message_of({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": PDF}]}),
            "whose source is base64 are not supported",
        ),
        (message_of({"type": "telepathy"}), "telepathy"),
        (message_of({"type": "text", "text": 1}), "text"),
        (message_of({"type": "tool_use", "id": "1", "name": "price", "input": {}}), "role user must not have tool_use"),
        (message_of({"type": "tool_result", "content": "23"}), "tool_use_id"),
        ({"tools": [{"type": "bash_20250124"}]}, "name"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "does not declare"),
        ({"tools": [{"name": "price"}]}, "input_schema"),
        ({"tools": [PRICE | {"input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}}, "price"),
        ({"tools": [PRICE], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [PRICE], "tool_choice": {"type": "tool", "name": "buy"}}, "does not declare"),
        ({"thinking": {"type": "enable"}}, "thinking"),
        ({"stop_sequences": ["x" * 70_000]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"system": "a" * 70_000}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "tokens"),
        ({"jinfercept": {"relase": True}}, "release"),
        ({"jinfercept": {"server_tools": True}}, "the server has no tools"),
    ],
)
def test_what_is_wrong_is_named(served: Running, fields: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        answer = post(served, **fields, stream=stream)
        status, kind, message = failed(answer)
        assert (status, kind) == (400, "invalid_request_error")
        assert words in message


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_clients_learn_that_they_have_to_send_whole_conversations(served: Running, path: str) -> None:
    answer = post(served, path, thread={"type": "continue", "previous_message_id": "msg_1"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, details)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_hostile_bodies_get_an_answer(served: Running, path: str) -> None:
    deep = [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": NOUGHT}]}]
    for body in (b"{", b"null", b"\xff", b"[" * 50_000, b'{"max_tokens": 1e400}', b'{"system": "\\udfff"}'):
        assert failed(served.http.post(path, content=body, headers=JSON))[:2] == (400, "invalid_request_error")
    for fields in (
        {"messages": [{"role": "user", "content": [{}] * 5000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
        {"messages": [{"role": "user", "content": ""}] * 16385},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}] * 4000}] * 5},
        {"messages": ASKED, **{f"x{number}": 1 for number in range(300)}},
        {"messages": ASKED, "tools": [PRICE] * 2},
    ):
        assert failed(post(served, path, **fields))[0] == 400
    assert post(served, path, messages=[*deep, *ASKED], tools=[PRICE]).status_code in (200, 400)
    assert failed(served.http.post(path, content=b"{}", headers={"content-type": "text/plain"}))[0] == 415


def test_a_deferred_tool_is_declared_once_however_often_results_refer_to_it(served: Running) -> None:
    tool = PRICE | {"defer_loading": True, "description": "a" * 30_000}
    reference = {"type": "tool_reference", "tool_name": "price"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [reference] * 1000}
    messages = [*ASKED, *message_of(result)["messages"]]
    assert post(served, COUNT, tools=[tool], messages=messages).json()["input_tokens"] in range(30_000, 60_000)


def test_numbers_without_measure_are_limited_by_the_context(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    assert post(served, max_tokens=10**400, top_k=2**70).json()["content"][0]["text"] == "It costs 23."


def test_routes_and_models_that_are_not_there(served: Running) -> None:
    for answer in (post(served, "/v1/messages/batches"), post(served, model="claude"), post(served, COUNT, model="x")):
        assert failed(answer)[:2] == (404, "not_found_error")
    assert failed(served.http.get(MESSAGES))[0] == 405
    answer = served.http.get("/v1/models/claude", headers={"anthropic-version": "2023-06-01"})
    assert failed(answer)[:2] == (404, "not_found_error")
    with pytest.raises(library.NotFoundError, match="no model is named"):
        create(served, model="claude")


def test_a_stream_that_fails_ends_with_an_error_event(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "It costs 23." + END)

    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("jinfercept.serve.protocols.anthropic.answer._stop", fail)
    raw = post(served, stream=True)
    *_, event, data = raw.text.strip().split("\n")
    assert event == "event: error"
    assert '"error":{"type":"api_error","message":"the server failed: RuntimeError"}' in data
    assert f'"request_id":"{raw.headers["request-id"]}"' in data


def test_keys_share_no_context_and_come_in_either_header(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    with running(served.llm, api_key=("one", "two"), max_body_size=1000) as server:
        cached = [create(server, key=key).usage.cache_read_input_tokens for key in ("one", "two", "one")]
        assert cached[:2] == [0, 0]
        assert cached[2] > 0
        body = {"messages": ASKED, "max_tokens": 4}
        statuses = [
            server.http.post(MESSAGES, json=body, headers=headers).status_code
            for headers in (
                {"x-api-key": "one"},
                {"x-api-key": "one", "Authorization": "Bearer one"},
                {"x-api-key": "", "Authorization": "Bearer one"},
                {"x-api-key": "one", "Authorization": "Bearer two"},
                {"x-api-key": "three"},
                {"x-api-key": ""},
                {},
            )
        ]
        assert statuses == [200, 200, 200, 400, 401, 401, 401]
        assert failed(server.http.post(COUNT, json=body))[:2] == (401, "authentication_error")
        version = {"x-api-key": "one", "anthropic-version": "2023-06-01"}
        assert server.http.get("/v1/models", headers=version).json()["data"][0]["id"] == MODEL
        assert server.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "one"}).status_code == 401
        long = body | {"system": "a" * 2000}
        assert failed(server.http.post(MESSAGES, json=long, headers=version))[:2] == (413, "request_too_large")
        with pytest.raises(library.AuthenticationError):
            create(server, key="three")
        server.wait_idle()


def test_a_full_queue_and_a_draining_server_say_when_to_retry(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service, "draining", True)
    answer = post(served)
    assert failed(answer)[:2] == (503, "overloaded_error")
    assert answer.headers["retry-after"]
    monkeypatch.setattr(served.service, "draining", False)
    preparing: Any = served.service._preparing  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(preparing, "", 5000)
    answer = post(served)
    assert failed(answer)[:2] == (429, "rate_limit_error")
    assert answer.headers["retry-after"]
