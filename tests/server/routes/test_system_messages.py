"""System and developer messages anywhere, with a template that takes one at the beginning: the same prompt in every dialect."""

from typing import Any

from tests.support.chat_templates import ONE_SYSTEM
from tests.support.live_server import END, MODEL, Running, prompt_of
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
