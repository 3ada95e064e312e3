"""`/inbox`: calls that wait for a person, over HTTP."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jinfercept.tools.calls import CallFailed
from jinfercept.tools.inbox import Inbox
from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted
from tests.support.tool_server import QUESTION, called, returned, says, shop
from tests.support.tool_server import ask as ask_chat
from tests.support.waiting_calls import ask

BOSS = """
[[tool]]
kind = "person"
name = "boss"
description = "Asks the boss."
"""


def test_a_call_is_seen_by_those_of_its_key_and_by_operators(scripted: Scripted, tmp_path: Path) -> None:
    keys = {"api_key": ("one", "two"), "operator_key": ("chief",)}
    with shop(scripted, tmp_path, toml=BOSS, **keys) as server, ThreadPoolExecutor(1) as pool:

        def seen(key: str) -> list[dict[str, Any]]:
            return server.http.get("/inbox", headers={"authorization": f"Bearer {key}"}).json()["data"]

        def waiting_for(key: str) -> int:
            return server.http.get("/live", headers={"authorization": f"Bearer {key}"}).json()["inbox"]

        def answered(key: str, call_id: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return server.http.post(f"/inbox/{call_id}/answer", json={"text": key}, headers=headers).status_code

        for key in ("one", "chief"):
            turn = called("", ("boss", None))
            turn["tool_calls"][0]["function"]["arguments"] = {"question": key}
            says(scripted, server, f"{key} says so.", [*QUESTION, turn, returned(key)])
            waiting = pool.submit(lambda: ask_chat(server, QUESTION))
            until(lambda: bool(seen("one")))
            [call] = seen("chief")
            assert (seen("two"), [visible["id"] for visible in seen("one")]) == ([], [call["id"]])
            assert [waiting_for(reader) for reader in ("one", "two", "chief")] == [1, 0, 1]
            assert [answered("two", call["id"]), answered(key, call["id"])] == [404, 200]
            assert waiting.result().choices[0].message.content == f"{key} says so."


@pytest.fixture
def asking(scripted: Scripted) -> Iterator[Running]:
    with running(scripted.llm) as server:
        server.service.inbox = Inbox()
        yield server


def test_a_call_is_listed_answered_and_gone(asking: Running) -> None:
    assert asking.service.inbox is not None
    answer = ask(asking.service.inbox, amount=3)
    assert asking.http.get("/live").json()["inbox"] == 1
    [call] = asking.http.get("/inbox").json()["data"]
    assert (call["tool"], call["arguments"], call["request_id"]) == ("approve", {"amount": 3}, "chatcmpl-1")
    assert call["expires_at"] - call["asked_at"] == pytest.approx(60, abs=1)
    done = asking.http.post(f"/inbox/{call['id']}/answer", json={"text": "yes"})
    assert (done.status_code, done.json()) == (200, {"id": call["id"]})
    assert answer.result(60) == "yes"
    assert asking.http.get("/inbox").json() == {"data": []}
    for name in (call["id"], "0" * 12, "%00"):
        again = asking.http.post(f"/inbox/{name}/answer", json={"text": "yes"})
        assert (again.status_code, again.json()["error"]["code"]) == (404, "call_not_found")


def test_a_call_is_declined_with_or_without_a_reason(asking: Running) -> None:
    assert asking.service.inbox is not None
    for body, message in ((None, "declined"), ({}, "declined"), ({"why": "too much"}, "too much")):
        answer = ask(asking.service.inbox, amount=len(body or ()))
        [call] = asking.http.get("/inbox").json()["data"]
        assert asking.http.post(f"/inbox/{call['id']}/decline", json=body).status_code == 200
        with pytest.raises(CallFailed, match=message):
            answer.result(60)


def test_a_wrong_body_changes_nothing(asking: Running) -> None:
    assert asking.service.inbox is not None
    answer = ask(asking.service.inbox, amount=1)
    [call] = asking.http.get("/inbox").json()["data"]
    for body in ({}, {"text": 3}, [], {"text": "x" * 70_000}):
        assert asking.http.post(f"/inbox/{call['id']}/answer", json=body).status_code == 400
    asking.http.post(f"/inbox/{call['id']}/answer", json={"text": ""})
    assert answer.result(60) == ""


def test_without_an_inbox_there_is_none_and_with_keys_it_needs_one(served: Running, scripted: Scripted) -> None:
    answer = served.http.get("/inbox")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_inbox")
    with running(scripted.llm, api_key=("one",)) as server:
        server.service.inbox = Inbox()
        assert server.http.get("/inbox").status_code == 401
        assert server.http.post("/inbox/x/answer", json={"text": ""}).status_code == 401
        assert server.http.get("/inbox", headers={"authorization": "Bearer one"}).json() == {"data": []}


def test_an_argument_with_half_a_character_is_listed_with_a_question_mark(asking: Running) -> None:
    assert asking.service.inbox is not None
    ask(asking.service.inbox, question="\ud800")
    [call] = asking.http.get("/inbox").json()["data"]
    assert call["arguments"] == {"question": "?"}
    asking.http.post(f"/inbox/{call['id']}/decline")
