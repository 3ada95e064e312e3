import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from jinfercept.protocols.anthropic.chat import chat_body
from jinfercept.protocols.anthropic.schemas import MessagesBody
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.chat_schemas import ChatBody
from jinfercept.protocols.openai.response_items import read_items
from jinfercept.protocols.openai.response_messages import messages_of
from jinfercept.protocols.openai.response_schemas import ResponsesBody
from jinfercept.server.http.json_body import BodyReader, parsed

CHAT, RESPONSES, MESSAGES = (TypeAdapter[Any](kind) for kind in (ChatBody, ResponsesBody, MessagesBody))
LONG = 'é "text" \\ {[,]} ' * 400


def message(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": f"{number} {LONG}"} | more


def encoded(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "temperature": 0.5} | more, ensure_ascii=False).encode()


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read().model_dump()
    except ApiError as error:
        return vars(error)


def test_messages_that_an_earlier_body_had_are_the_same_objects() -> None:
    reader = BodyReader()
    messages = [message(number) for number in range(6)]
    before = reader.read(encoded(messages[:4]), CHAT, "messages", "key")
    after = reader.read(encoded(messages, temperature=1.5), CHAT, "messages", "key")
    assert [new is old for new, old in zip(after.messages, before.messages, strict=False)] == [True] * 4
    assert after == parsed(encoded(messages, temperature=1.5), CHAT)
    fork = reader.read(encoded([*messages[:3], message(9)]), CHAT, "messages", "key")
    assert fork.messages[2] is after.messages[2]
    assert fork == parsed(encoded([*messages[:3], message(9)]), CHAT)
    again = reader.read(encoded(messages), CHAT, "messages", "key")
    assert again.messages[2] is after.messages[2]


def test_tenants_and_salts_share_no_messages() -> None:
    reader = BodyReader()
    body = encoded([message(0), message(1)])
    first = reader.read(body, CHAT, "messages", "key")
    assert reader.read(body, CHAT, "messages", "other").messages[0] is not first.messages[0]
    salted = encoded([message(0), message(1)], cache_salt="s")
    salted_read = reader.read(salted, CHAT, "messages", "key")
    assert salted_read.messages[0] is not first.messages[0]
    assert reader.read(salted, CHAT, "messages", "key").messages[0] is not salted_read.messages[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"0.5", b"true"),
        lambda text: text.replace(b'"1 ', b'"2 '),
        lambda text: text.replace(b'{"role": "user", "content": "3', b'{"role": "robot", "content": "3'),
        lambda text: text.replace(b'{"role": "user", "content": "3', b'7, {"role": "user", "content": "3'),
        lambda text: text[:-20],
        lambda text: text + b"]",
        lambda text: text.replace(b"}]", b"},]"),
        lambda text: text.replace(b"}]", b"}, 1e999]"),
        lambda text: text.replace(b"0.5}", b'0.5, "messages": []}'),
        lambda text: text.replace(b"0.5}", b'0.5, "messages": [{"role": "user", "content": "Hi"}]}'),
        lambda text: text.replace(b"0.5}", b'0.5, "metadata": {"n": 1e999}}'),
        lambda text: b'{"metadata": ' + text[:-1] + b', "x": 1}, "messages": [{"role": "user", "content": "Hi"}]}',
        lambda text: text.replace(b'"messages": [', b'"messages":  [ '),
    ],
)
def test_every_body_is_read_as_if_no_other_had_come_before_it(change: Callable[[bytes], bytes]) -> None:
    reader = BodyReader()
    reader.read(encoded([message(number) for number in range(3)]), CHAT, "messages", "key")
    body = change(encoded([message(number) for number in range(4)]))
    for _ in range(2):
        assert outcome(lambda: reader.read(body, CHAT, "messages", "key")) == outcome(lambda: parsed(body, CHAT))


def test_random_edits_of_bodies_change_nothing_of_what_is_read() -> None:
    rng, reader = random.Random(0), BodyReader()
    for _ in range(60):
        messages = [message(rng.randrange(2), name=rng.choice(["a", "b"])) for _ in range(rng.randint(3, 8))]
        body = bytearray(encoded(messages))
        if rng.random() < 0.5:
            body[rng.randrange(len(body))] = rng.choice(b'{}[],:"\\ 1')
        given = bytes(body)
        read = outcome(lambda given=given: reader.read(given, CHAT, "messages", "key"))
        assert read == outcome(lambda given=given: parsed(given, CHAT))


def test_lists_are_forgotten_by_age_and_by_size() -> None:
    now = [0.0]
    reader = BodyReader(max_age_s=10, now=lambda: now[0])
    body = encoded([message(0), message(1)])
    first = reader.read(body, CHAT, "messages", "key")
    now[0] = 11
    assert reader.read(body, CHAT, "messages", "key").messages[0] is not first.messages[0]
    assert len(reader) == 1
    small = BodyReader(most_bytes=40_000)
    for number in range(5):
        small.read(encoded([message(number), message(1)]), CHAT, "messages", "key")
        assert len(small) <= 1


def test_a_conversation_of_messages_is_converted_once() -> None:
    def body(*results: str) -> bytes:
        messages = [{"role": "user", "content": LONG}]
        for number, text in enumerate(results):
            use = {"type": "tool_use", "id": f"c{number}", "name": "f", "input": {"n": [1, True]}}
            result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": text + LONG}
            messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return json.dumps({"messages": messages, "system": "Be brief.", "max_tokens": 9}).encode()

    reader = BodyReader()
    before = chat_body(reader.read(body("a", "b"), MESSAGES, "messages", "key"))
    after = chat_body(reader.read(body("a", "c"), MESSAGES, "messages", "key"))
    assert after == chat_body(parsed(body("a", "c"), MESSAGES))
    same = [new is old for new, old in zip(after.messages, before.messages, strict=True)]
    assert same == [False, True, True, True, True, False]
    assert after.messages[1].as_read is before.messages[1].as_read


def test_a_conversation_of_responses_is_converted_once() -> None:
    def body(*results: str) -> bytes:
        items: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
        for number, text in enumerate(results):
            call = {"call_id": f"c{number}", "name": "f", "arguments": "{}"}
            items.append({"type": "message", "role": "assistant", "content": "I look."})
            items.append({"type": "function_call"} | call)
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": text + LONG})
        return json.dumps({"input": items}).encode()

    reader = BodyReader()
    before, after = (
        read_items(reader.read(text, RESPONSES, "input", "key").input, [], {})
        for text in (body("a", "b"), body("a", "c"))
    )
    assert {item["id"] for item in before}.isdisjoint(item["id"] for item in after)
    earlier, later = messages_of(before, "Be brief."), messages_of(after, "Be brief.")
    assert later == messages_of(read_items(parsed(body("a", "c"), RESPONSES).input, [], {}), "Be brief.")
    same = [new is old for new, old in zip(later, earlier, strict=True)]
    assert same == [False, True, True, True, True, False]
