"""Stored responses in a database: found, continued, cancelled and deleted at every server; failed by name if theirs is lost."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI
from sqlalchemy import update

from jinfercept.serve.options import ServerOptions
from jinfercept.serve.state.entries import ENTRIES
from tests.support.gate import Gate
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import ASKED, CALL, CHAT_PRICE, PRICE, QUESTION, answer, says
from tests.support.scripted_model import Scripted

LONG: Any = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
KEYS = ("mine", "yours")


class Pair(NamedTuple):
    """Two servers with one database."""

    first: Running
    second: Running


@pytest.fixture
def pair(scripted: Scripted, state_url: str) -> Iterator[Pair]:
    options: Any = {"state_url": state_url, "api_key": KEYS}
    with running(scripted.llm, **options) as first, running(scripted.llm, **options) as second:
        yield Pair(first, second)


def test_what_one_server_has_answered_another_finds_continues_and_deletes(pair: Pair, scripted: Scripted) -> None:
    says(scripted, CALL + END, tools=[CHAT_PRICE])
    first = answer(pair.first, tools=[PRICE], metadata={"nul": "\x00", "text": "Grüße \u2028"})
    there: Any = pair.second.client.responses
    assert there.retrieve(first.id) == pair.first.client.responses.retrieve(first.id) == first
    [call] = first.output
    chat = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": "price", "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "price", "content": "23"},
    ]
    says(scripted, "It costs 23." + END, chat, tools=[CHAT_PRICE])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "23"}
    second = answer(pair.second, [result], tools=[PRICE], previous_response_id=first.id)
    assert second.output_text == "It costs 23."
    listed = [item.type for item in pair.first.client.responses.input_items.list(second.id, order="asc")]
    assert listed == ["message", "function_call", "function_call_output"]
    longer = [*chat, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "Why?"}]
    says(scripted, "Brass." + END, longer)
    assert answer(pair.first, "Why?", previous_response_id=second.id).output_text == "Brass."
    referred = [{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "So?"}]
    says(scripted, "Yes." + END, [{"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "So?"}])
    assert answer(pair.first, referred).output_text == "Yes."
    pair.first.client.responses.delete(first.id)
    for server in pair:
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(first.id)
    says(scripted, "Brass." + END, longer)
    assert answer(pair.first, "Why?", previous_response_id=second.id).output_text == "Brass."  # its beginning remains


def test_another_key_finds_nothing_at_any_server(pair: Pair, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    done = answer(pair.first)
    reference = [{"type": "item_reference", "id": done.output[0].id}]
    asks: tuple[Callable[[Any], Any], ...] = (
        lambda responses: responses.retrieve(done.id),
        lambda responses: responses.delete(done.id),
        lambda responses: responses.cancel(done.id),
        lambda responses: responses.input_items.list(done.id).data,
        lambda responses: responses.create(model=MODEL, input="Hi", previous_response_id=done.id),
        lambda responses: responses.create(model=MODEL, input=reference),
    )
    for server in pair:
        with OpenAI(base_url=f"{server.url}/v1", api_key="yours", max_retries=0) as other:
            for ask in asks:
                with pytest.raises(openai.NotFoundError):
                    ask(other.responses)
    assert pair.second.client.responses.retrieve(done.id).output_text == "23."


def test_ids_that_no_database_takes_are_missing(pair: Pair) -> None:
    headers = {"authorization": "Bearer mine"}
    for name in ("%00", "resp_%00", "x" * 10_000, "%ED%A0%80", "resp_" + "0" * 32, "%27%3B--"):
        for path in (name, f"{name}/input_items"):
            assert pair.first.http.get(f"/v1/responses/{path}", headers=headers).status_code == 404
    body = {"input": [{"type": "item_reference", "id": "\x00"}]}
    assert pair.first.http.post("/v1/responses", headers=headers, json=body).json()["error"]["code"] == "item_not_found"
    odd_item = {"id": "\x00'", "type": "message", "role": "user", "content": "a\x00b"}
    done = pair.first.http.post("/v1/responses", headers=headers, json={"input": [odd_item], "max_output_tokens": 1})
    [item] = pair.second.http.get(f"/v1/responses/{done.json()['id']}/input_items", headers=headers).json()["data"]
    assert (item["id"], item["content"][0]["text"]) == ("\x00'", "a\x00b")


@pytest.mark.usefixtures("gate")
def test_a_response_in_the_background_is_found_by_other_servers_once_it_has_ended(
    pair: Pair, scripted: Scripted
) -> None:
    scripted.follow()
    begun = answer(pair.first, background=True, stream=False, **LONG)
    there: Any = pair.second.client.responses
    assert (there.retrieve(begun.id).status, there.retrieve(begun.id).error.code) == ("failed", "server_lost")
    with pytest.raises(openai.BadRequestError, match="the previous response is"):
        answer(pair.first, previous_response_id=begun.id)
    pair.first.client.responses.cancel(begun.id)
    assert [server.client.responses.retrieve(begun.id).status for server in pair] == ["cancelled"] * 2
    with pytest.raises(openai.BadRequestError, match="another server generated it; fix: poll the response"):
        list(there.retrieve(begun.id, stream=True))
    there.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        pair.first.client.responses.retrieve(begun.id)


@pytest.mark.usefixtures("gate")
def test_a_response_that_is_deleted_while_it_is_generated_is_not_stored(pair: Pair, scripted: Scripted) -> None:
    scripted.follow()
    begun = answer(pair.first, background=True, **LONG)
    pair.first.client.responses.delete(begun.id)
    for server in pair:
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(begun.id)


def test_a_response_expires_at_all_servers(pair: Pair, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    done = answer(pair.first)
    expired = update(ENTRIES).where(ENTRIES.c.id == done.id).values(expires=1.0)
    pair.first.service.database.transact(lambda entries: entries._rows.execute(expired))
    for server in pair:
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(done.id)


@pytest.mark.usefixtures("gate")
def test_nothing_is_left_open_when_servers_end(
    scripted: Scripted, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("_ENDING_S", "_MOST_ENDING_S"):
        monkeypatch.setattr(f"jinfercept.serve.service.{seconds}", 60.0)  # for a busy machine
    scripted.follow()
    with running(scripted.llm, state_url=state_url, drain_timeout=0.0) as server:
        begun = answer(server, background=True, **LONG)
    with running(scripted.llm, state_url=state_url) as server:
        seen: Any = server.client.responses.retrieve(begun.id)
        assert (seen.status, seen.error.code) == ("failed", "server_error")


@contextmanager
def locked(path: str) -> Iterator[None]:
    """A database that answers no writer."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@contextmanager
def impatient(scripted: Scripted, path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server that waits for a lock for a short time only."""
    open_state = ServerOptions.open_state
    monkeypatch.setattr(ServerOptions, "open_state", lambda self, timeout_s: open_state(self, 0.5))
    with running(scripted.llm, state_url=path) as server:
        server.service.database.timeout_s = 60.0
        yield server


def test_a_database_that_does_not_answer_is_503_by_name_and_what_is_not_stored_goes_on(
    scripted: Scripted, state_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "23." + END)
    with impatient(scripted, state_path, monkeypatch) as server:
        with locked(state_path):
            refused = server.http.post("/v1/responses", json={"input": QUESTION, "temperature": 0})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
            assert refused.headers["retry-after"] == "1"
            assert answer(server, store=False).output_text == "23."
            assert server.chat().status_code == 200
        assert answer(server).output_text == "23."


def test_a_response_ends_as_failed_if_its_end_cannot_be_stored_and_one_in_the_background_waits(
    scripted: Scripted, gate: Gate, state_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "It costs 23. " * 40
    says(scripted, text + END)
    with impatient(scripted, state_path, monkeypatch) as server:
        events = iter(answer(server, stream=True))
        connected = next(events).response.id
        begun = answer(server, background=True)
        with locked(state_path):
            gate.open()
            last = list(events)[-1]
            assert (last.type, last.response.error.code) == ("response.failed", "state_unavailable")
            until(lambda: not server.state.has_work)
        until(lambda: server.client.responses.retrieve(begun.id).status == "completed")
        done: Any = server.client.responses.retrieve(begun.id)
        assert done.output_text == text
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(connected)
