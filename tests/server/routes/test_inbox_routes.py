"""`/inbox`: calls that wait for a person, over HTTP."""

from collections.abc import Iterator

import pytest

from jinfercept.tools.calls import CallFailed
from jinfercept.tools.inbox import Inbox
from tests.support.live_server import Running, running
from tests.support.scripted_model import Scripted
from tests.support.waiting_calls import ask


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
