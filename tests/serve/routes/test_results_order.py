"""One prompt in every dialect: one system message, and every call before its own result, in whatever order they come."""

from typing import Any

import pytest

from tests.support.chat_templates import ONE_SYSTEM, QWEN
from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED as QUESTION
from tests.support.scripted_model import Make, Scripted

TURNS: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LATER: Any = {"role": "system", "content": "It is noon."}
PROMPT: Any = [
    {"role": "system", "content": "Be brief.\n\nBe kind."},
    *TURNS,
    {"role": "user", "content": "<system>\nIt is noon.\n</system>\n\nBye"},
]
BYE: Any = {"role": "user", "content": "Bye"}


def test_every_dialect_has_one_system_message_and_later_ones_in_the_turn_of_the_user(
    served: Running, scripted: Scripted, make_scripted: Make
) -> None:
    scripted = make_scripted(ONE_SYSTEM)
    scripted.follow(prompt_of(scripted, PROMPT) + "Good." + END)
    leading = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}]
    body = {"model": MODEL, "max_tokens": 20, "temperature": 0}
    chat = served.http.post("/v1/chat/completions", json=body | {"messages": [*leading, *TURNS, LATER, BYE]}).json()
    assert chat["choices"][0]["message"]["content"] == "Good."
    items = [leading[1], *TURNS, LATER | {"role": "developer"}, BYE]
    response = served.http.post(
        "/v1/responses", json={"input": items, "instructions": "Be brief.", "temperature": 0}
    ).json()
    assert response["output"][0]["content"][0]["text"] == "Good."
    for system, messages in (
        ("Be brief.\n\nBe kind.", [*TURNS, LATER, BYE]),
        ("Be brief.", [leading[1] | {"role": "system"}, *TURNS, LATER, BYE]),
    ):
        message = served.http.post("/v1/messages", json=body | {"system": system, "messages": messages}).json()
        assert message["content"][0]["text"] == "Good.", message


CALLS: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("c1", "price"), ("c2", "stock"))
    ],
}
RESULTS: Any = {
    call_id: {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
    for call_id, name, text in (("c1", "price", "23 Euro"), ("c2", "stock", "7 left"))
}
HURRY: Any = {"role": "user", "content": "Hurry!"}
NOTE: Any = {"role": "developer", "content": "Be brief."}
READ_NOTE: Any = NOTE | {"role": "system"}
NOTE_OF_USER: Any = {"role": "user", "content": "<system>\nBe brief.\n</system>"}


def as_items(message: Any) -> list[Any]:
    """A message as items of `/v1/responses`."""
    if message["role"] == "tool":
        return [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]},
            {"type": "reasoning", "summary": []},
        ]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    return calls or [message]


def as_message(message: Any) -> Any:
    """A message of Anthropic's protocol; those of one role in a row are one turn."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        for call in message.get("tool_calls", ())
    ]
    role = {"developer": "system"}.get(message["role"], message["role"])
    return {"role": role, "content": calls or message["content"]}


def test_every_call_stands_before_its_own_result_in_every_dialect(
    served: Running, make_scripted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = make_scripted(QWEN)
    first, second = RESULTS["c1"], RESULTS["c2"]
    cases = [
        ((second, first), (first, second)),
        ((HURRY, second, first), (first, second, HURRY)),
        ((second, HURRY, first), (first, second, HURRY)),
        ((NOTE, first, second), (first, second, READ_NOTE)),
        ((second, HURRY), (second, HURRY)),
    ]
    expected = [prompt_of(scripted, [*QUESTION, CALLS, *read]) for _, read in cases]
    in_turn_of_user = prompt_of(scripted, [*QUESTION, CALLS, first, second, NOTE_OF_USER])
    prompts = list[str | None]()
    make_chats = scripted.llm.make_chats

    def recording(*args: Any, **more: Any) -> Any:
        made = make_chats(*args, **more)
        prompts.append(made[0].prompt)
        return made

    monkeypatch.setattr(scripted.llm, "make_chats", recording)
    for (given, read), prompt in zip(cases, expected, strict=True):
        assert [text in prompt for text in ("23 Euro", "7 left")] == [first in read, True]
        messages, body = [*QUESTION, CALLS, *given], {"max_tokens": 1}
        items = [item for message in messages for item in as_items(message)]
        for path, fields in (
            ("chat/completions", body | {"messages": messages}),
            ("responses", {"input": items, "max_output_tokens": 1}),
            ("messages", body | {"messages": [*map(as_message, messages)]}),
        ):
            assert served.http.post(f"/v1/{path}", json=fields).status_code == 200
        assert prompts[-3:] == [prompt, prompt, in_turn_of_user if NOTE in given else prompt]
