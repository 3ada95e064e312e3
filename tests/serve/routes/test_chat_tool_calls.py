"""Tool calls of `/v1/chat/completions`: the client answers them, streamed or not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.chat_templates import PLAIN, QWEN_ITEMS
from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED as QUESTION
from tests.support.responses import CALL, CHAT_PRICE, PEN, says
from tests.support.responses import CHAT_PRICE as PRICE
from tests.support.responses import PRICE as WRITTEN_PRICE
from tests.support.scripted_model import Make, Scripted


def test_a_tool_is_called_by_the_client_and_its_result_is_read(served: Running, scripted: Scripted) -> None:
    says(scripted, "Let me see.\n" + CALL + END, tools=[PRICE])
    create = served.client.chat.completions.create
    done = create(model=MODEL, messages=QUESTION, tools=[PRICE], temperature=0)
    [choice] = done.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("price", {"item": "lamp"})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "23"}
    messages = [*QUESTION, choice.message.model_dump(exclude_none=True), result]
    says(scripted, "It costs 23." + END, messages, tools=[PRICE])
    answer = create(model=MODEL, messages=messages, tools=[PRICE], temperature=0)
    assert answer.choices[0].message.content == "It costs 23."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_a_call_has_no_id_that_a_call_of_the_conversation_has(served: Running, scripted: Scripted) -> None:
    function = {"name": "price", "arguments": '{"item": "lamp"}'}
    call = {"id": "c1", "type": "function", "function": function}
    before: list[Any] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]
    for messages, kept in ((QUESTION, True), ([*QUESTION, *before], False)):
        says(scripted, CALL.replace('{"name"', '{"id": "c1", "name"') + END, messages, tools=[PRICE])
        done: Any = served.client.chat.completions.create(model=MODEL, messages=messages, tools=[PRICE], temperature=0)
        assert (done.choices[0].message.tool_calls[0].id == "c1") == kept


def test_calls_are_streamed_with_their_name_first_and_arguments_in_pieces(served: Running, scripted: Scripted) -> None:
    says(scripted, CALL + "\n" + PEN + END, tools=[PRICE])
    stream = served.client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[PRICE], temperature=0, stream=True
    )
    deltas = [chunk.choices[0] for chunk in stream]
    calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    for index, item in ((0, "lamp"), (1, "pen")):
        first, *rest = [call for call in calls if call.index == index]
        assert first.function is not None
        assert (first.type, first.function.name, first.function.arguments) == ("function", "price", "")
        assert first.id
        assert all(call.id is None and call.function and call.function.name is None for call in rest)
        assert len(rest) > 3
        assert json.loads("".join((call.function and call.function.arguments) or "" for call in rest)) == {"item": item}
    assert "".join(delta.delta.content or "" for delta in deltas).strip() == ""
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("written", "fields", "called", "reason"),
    [
        (f"{CALL}\n{PEN}", {"parallel_tool_calls": False}, ["price"], "tool_calls"),
        (f"{CALL}\n{PEN}", {"tool_choice": {"type": "function", "function": {"name": "price"}}}, ["price"], "stop"),
        (CALL, {"tool_choice": "none"}, [], "stop"),
        (CALL.replace("price", "cost"), {}, ["cost"], "tool_calls"),
    ],
    ids=["not parallel", "named", "none", "not declared"],
)
def test_of_what_is_written_those_are_calls_that_the_fields_allow(
    served: Running, scripted: Scripted, written: str, fields: dict[str, Any], called: list[str], reason: str
) -> None:
    says(scripted, written + END, tools=[PRICE])
    [choice] = served.chat(messages=QUESTION, tools=[PRICE], max_tokens=200, **fields).json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    assert ([call["name"] for call in calls], choice["finish_reason"]) == (called, reason)
    assert all(json.loads(call["arguments"]) == {"item": "lamp"} for call in calls)
    assert choice["message"]["content"] == (None if called else CALL)


def test_an_answer_that_is_cut_off_has_the_calls_so_far_and_no_half_tag(served: Running, scripted: Scripted) -> None:
    written = f"Let me see.\n{CALL}\n{PEN}"
    says(scripted, written + END, tools=[PRICE])
    create: Any = served.client.chat.completions.create
    options = {"model": MODEL, "messages": QUESTION, "tools": [PRICE], "temperature": 0}
    seen = set[tuple[int, bool]]()
    for length in range(1, len(written), 13):
        [choice] = create(**options, max_tokens=length).choices
        content = choice.message.content or ""
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert (choice.finish_reason, "Let me see.".startswith(content)) == ("length", True)
        seen.add((len(calls), bool(calls) and calls[-1][1].endswith("}")))
    assert seen == {(0, False), (1, False), (1, True), (2, False), (2, True)}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "price"}}])
def test_a_tool_that_has_to_be_called_is_called(served: Running, scripted: Scripted, choice: Any) -> None:
    parameters = {"type": "object", "properties": {"item": {"enum": ["lamp", "pen"]}}, "required": ["item"]}
    tool = {"type": "function", "function": {"name": "price", "parameters": parameters}}
    says(scripted, "<tool_call>I had rather not." + END, tools=[tool])
    create: Any = served.client.chat.completions.create
    options = {"temperature": 1, "seed": 3, "max_tokens": 300, "parallel_tool_calls": False}
    done = create(model=MODEL, messages=QUESTION, tools=[tool], tool_choice=choice, **options)
    call = done.choices[0].message.tool_calls[0].function
    reason = done.choices[0].finish_reason
    assert (call.name, reason) == ("price", "tool_calls" if choice == "required" else "stop")
    assert json.loads(call.arguments)["item"] in ("lamp", "pen")


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}


def test_a_custom_tool_is_called_with_a_text(served: Running, scripted: Scripted) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "+"'}}
    tool: Any = {"type": "custom", "custom": PATCH["custom"] | {"format": grammar}}
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    text = 'Edits.\n\nThe input follows this lark grammar:\nstart: "+"'
    function = {"name": "patch", "description": text, "parameters": schema | {"additionalProperties": False}}
    shown, tools = [PRICE, {"type": "function", "function": function}], [PRICE, tool]
    written = f"{CALL}\n{CALL.replace('price', 'patch').replace('item', 'input')}"
    says(scripted, written + END, tools=shown)
    create: Any = served.client.chat.completions.create
    fields: Any = {"model": MODEL, "tools": tools, "temperature": 0}
    done = create(messages=QUESTION, **fields)
    calls = done.choices[0].message.tool_calls
    assert [call.type for call in calls] == ["function", "custom"]
    assert calls[1].custom.model_dump() == {"name": "patch", "input": "lamp"}
    before = done.choices[0].message.model_dump(exclude_none=True)
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "23"} for call in calls]
    functions = [{"name": name, "arguments": {key: "lamp"}} for name, key in (("price", "item"), ("patch", "input"))]
    read: Any = before | {"tool_calls": [{"type": "function", "function": function} for function in functions]}
    says(scripted, "Done." + END, [*QUESTION, read, *results], tools=shown)
    answer = create(messages=[*QUESTION, before, *results], **fields)
    assert answer.choices[0].message.content == "Done."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "description": 1}}]}, "tools[0].function.description"),
        ({"tools": [PATCH, PATCH]}, "tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "b"}}, "tools": [PATCH]}, "tool_choice"),
    ],
)
def test_a_custom_tool_that_is_wrong_is_refused(served: Running, fields: Any, param: str) -> None:
    answer = served.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


ASKED: Any = [{"role": "user", "content": "How much is a lamp?"}]
ANTHROPIC: Any = {"name": "price", "description": "The price of an item.", "input_schema": WRITTEN_PRICE["parameters"]}
DIALECTS = pytest.mark.parametrize(
    ("path", "tool", "field"),
    [
        ("/v1/chat/completions", CHAT_PRICE, "messages"),
        ("/v1/responses", WRITTEN_PRICE, "input"),
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
