"""Errors: wrong and hostile requests get an answer in OpenAI's shape, never a 5xx, and lose no page."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic_core import from_json

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody
from jinfercept.serve.protocols.openai.completion_answer import CompletionBody
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.protocols.schemas import Body
from jinfercept.serve.routes import guarded_route
from jinfercept.serve.routes.tokens import DetokenizeBody, TokenizeBody
from tests.support.live_server import Running
from tests.support.scripted_model import Scripted
from tests.support.served import CHAT, SHORT, shape

LONG = "x" * 70_000
"""More than the 65,536 characters that a prompt of a small model may have."""


def test_half_a_surrogate_pair_in_a_schema_is_400(served: Running) -> None:
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": '{"enum":["\\ud800"]}'}}
    assert shape(served.http.post("/v1/completions", json=body))[0] == 400


def test_a_schema_whose_compilation_has_no_bound_is_400_at_once(served: Running) -> None:
    schema = {"type": "integer", "multipleOf": 99_999_999}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}}),
        (CHAT, chat | {"tools": [tool], "tool_choice": "required"}),
    ):
        assert shape(served.http.post(path, json=body, timeout=60))[0] == 400, path


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
def test_a_bound_of_a_schema_that_no_float_holds_is_no_failure_of_the_server(served: Running, key: str) -> None:
    schema = {"type": "integer", key: 10**400}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}}),
        (CHAT, SHORT[CHAT] | {"max_tokens": 1, "tools": [tool], "tool_choice": "required"}),
    ):
        assert served.http.post(path, json=body).status_code in (200, 400), path


def test_penalties_that_make_logits_infinite_are_400(served: Running) -> None:
    for penalty in (1e-300, 1e300):
        body = {"prompt": "x", "max_tokens": 1, "repetition_penalty": penalty}
        answer = served.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_penalty")


def test_an_answer_is_one_line_to_every_client() -> None:
    answer = {"text": "a\x85b\u2028c\u2029d é \n \x1c"}
    assert len(encode(answer).decode().splitlines()) == 1
    assert from_json(encode(answer)) == answer


def test_half_a_surrogate_pair_in_an_answer_breaks_nothing() -> None:
    assert encode({"name": "a\ud800é"}) == '{"name":"a?é"}'.encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["x"] * 65}, "stop: List should have at most 64 items"),
        ({"stop": "x" * 4097}, "stop: String should have at most 4096 characters"),
        ({"prompt": ["x"] * 2049}, "prompt: List should have at most 2048 items"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "prompt[0]: List should have at least 1 item"),
        ({"n": "two"}, "n: Input should be a valid integer (got 'two')"),
        (
            {"jinfercept": {"server_tools": "price"}},
            "jinfercept.server_tools: Input should be a valid boolean or a valid list (got 'price')",
        ),
        ({"stop": [""]}, "stop is wrong; got ['']; fix: give a text that is not empty, or a list of such texts"),
        ({"stop": ["a", ""]}, "stop is wrong; got ['a', '']"),
    ],
)
def test_of_several_readings_the_likely_one_is_complained_of(
    served: Running, fields: dict[str, Any], message: str
) -> None:
    answer = served.http.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert answer.json()["error"]["message"].startswith(message)


def test_what_is_no_object_is_complained_of_without_names_of_classes(served: Running) -> None:
    for path in ("/v1/completions", CHAT, "/v1/responses", "/v1/conversations/conv_x"):
        answer = served.http.post(path, content=b"[]", headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "the body: Input should be an object (got [])",
        )
    answer = served.http.post(CHAT, json={"messages": [3]})
    assert answer.json()["error"]["message"] == "messages[0]: Input should be an object (got 3)"


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody])
def test_every_list_of_a_body_has_a_limit_and_ends_at_its_first_mistake(body: type[Body]) -> None:
    def lists(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "list" and "items_schema" in schema:
                yield schema
            for part in schema.values():
                yield from lists(part)
        elif isinstance(schema, list | tuple):
            for part in schema:
                yield from lists(part)

    schemas = list(lists(body.__pydantic_core_schema__))
    assert schemas
    assert all(schema.get("fail_fast") and schema.get("max_length") for schema in schemas)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [f"Hello {number}" for number in range(300)]}),
        ("/v1/completions", {"prompt": [[65 + number % 50] * 9 for number in range(300)], "stream": True}),
        ("/v1/completions", {"prompt": ["Hello", "Good bye"], "n": 128, "temperature": 1}),
        ("/v1/completions", {"prompt": [65] * 400_000}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}] * 100, "n": 128, "temperature": 1, "stream": True}),
        ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * 2000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}] * 2000}),
    ],
)
def test_however_much_is_in_a_body_the_event_loop_does_little_at_a_time(
    served: Running, scripted: Scripted, path: str, fields: dict[str, Any]
) -> None:
    scripted.follow()
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    fields = {"temperature": 0} | limit | fields
    first = {name: value[:1] if isinstance(value, list) else value for name, value in fields.items()}
    served.http.post(path, json=first | ({"n": 1} if "n" in fields else {})).raise_for_status()  # builds schemas
    loop = next(iter(served.server.server_state.connections)).loop
    calls, most = 0, 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, most
        if event == "call" and frame.f_code is asyncio.Handle._run.__code__:
            calls = 0
        calls += event in ("call", "c_call")
        most = max(most, calls)

    loop.call_soon_threadsafe(sys.setprofile, count)
    try:
        assert served.http.post(path, json=fields).status_code in (200, 400)
    finally:
        loop.call_soon_threadsafe(sys.setprofile, None)
    assert 0 < most < 20_000, "calls of functions between two turns of the loop"


def test_a_large_body_is_read_off_the_event_loop(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = list[str]()

    def read(*args: Any, **more: Any) -> Any:
        readers.append(threading.current_thread().name)
        return from_json(*args, **more)

    monkeypatch.setattr(guarded_route, "from_json", read)
    assert shape(served.http.post("/v1/completions", json={"prompt": [{}] * 100_000}))[0] == 400
    assert "heavy" in readers[0]


def test_a_body_may_not_be_full_of_fields_that_nobody_knows(served: Running) -> None:
    assert shape(served.chat(**{f"x{number}": 1 for number in range(300)}))[0] == 400


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": LONG}}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": "Hi", "reasoning_content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "1", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 8000}, "messages"),  # rendered, it is long
        (CHAT, {"tools": [TOOL]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"system": LONG}}, "chat_template_kwargs"),
        ("/v1/completions", {"prompt": ["Hi", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 5000}, "prompt"),
        ("/v1/completions", {"bad_words": [LONG[:40_000], LONG[:40_000]]}, "bad_words"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"instructions": LONG}, "input"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "assistant", "content": LONG}]}, "messages"),
        ("/detokenize", {"tokens": [1] * 70_000}, "tokens"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    served: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    encode, lengths = Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    answer = served.http.post(path, json=SHORT[path] | fields)
    assert (*shape(answer), answer.json()["error"]["param"]) == (400, "context_length_exceeded", param)
    assert max(lengths, default=0) < 1000


STUCK = 'start: r::0x0\nr::_: "a" r::incr([0:4]) %if lt([0:4], 3)\n'
"""A grammar that is valid, and cannot be ended by any text."""


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_a_grammar_that_cannot_go_on_is_the_client_s_mistake(served: Running, path: str) -> None:
    answer = served.http.post(path, json=SHORT[path] | {"structured_outputs": {"grammar": STUCK}})
    assert shape(answer) == (400, "grammar_error")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "name",
    [
        *("self", "messages", "conversations", "tools", "add_generation_prompt", "chat_template"),
        *("continue_final_message", "return_assistant_tokens_mask"),
    ],
)
def test_arguments_of_the_renderer_are_no_variables_of_a_template(served: Running, path: str, name: str) -> None:
    answer = served.http.post(path, json=SHORT[CHAT] | SHORT["/v1/responses"] | {"chat_template_kwargs": {name: 1}})
    assert (*shape(answer), answer.json()["error"]["param"]) == (400, None, "chat_template_kwargs")


def test_unknown_routes_methods_and_models_are_told_apart(served: Running) -> None:
    assert shape(served.http.get("/v1/nothing")) == (404, None)
    assert "the base URL of OpenAI's clients ends in /v1" in served.http.post("/v1/v1/messages", json={}).text
    answer = served.http.get(CHAT)
    assert shape(answer) == (405, None)
    assert answer.headers["allow"] == "POST"
    assert served.http.post("/v1/responses/one").headers["allow"] == "GET"
    assert shape(served.chat(model="gpt-9")) == (404, "model_not_found")
    assert shape(served.http.get("/v1/models/gpt-9")) == (404, "model_not_found")


def test_the_id_of_a_request_comes_back(served: Running) -> None:
    assert served.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(served.http.get("/nothing").headers["x-request-id"]) == 32
    assert len(served.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_models_health_version_and_documents_are_there(served: Running) -> None:
    [model] = served.client.models.list().data
    assert (model.id, model.object) == ("scripted", "model")
    assert served.client.models.retrieve("scripted").created == model.created
    for path in ("/health", "/ready", "/version"):
        assert served.http.get(path).status_code == 200
    document = served.http.get("/openapi.json").json()
    assert set(document["paths"][CHAT]["post"]["responses"]) == {"200", "default"}


def test_no_field_of_a_request_loads_code(served: Running, tmp_path: Path) -> None:
    mark, code = tmp_path / "ran", tmp_path / "own.py"
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("policy", "estimator", "workload", "order", "model", "user"):
        assert served.chat(**{name: f"{code}:Policy", "max_tokens": 1}).status_code < 500
    assert not mark.exists()
