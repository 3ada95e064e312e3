"""Stored responses in a database: found, continued, cancelled and deleted at every server; failed by name if theirs is lost."""

import sqlite3
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from jinfercept.state import response_rows, upkeep
from jinfercept.state.database import StateDatabase
from jinfercept.state.queries import ServerClock
from jinfercept.state.tables import ResponseRow
from jinfercept.state.trusted_clock import TrustedClock
from jinfercept.state.upkeep import Heartbeat
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
    options: Any = {"state_url": state_url, "state_heartbeat": 0.1, "api_key": KEYS}
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
@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_response_in_the_background_is_seen_and_ended_through_another_server(
    pair: Pair, scripted: Scripted, end: str
) -> None:
    scripted.follow()
    begun = answer(pair.first, background=True, stream=False, **LONG)
    there: Any = pair.second.client.responses
    assert there.retrieve(begun.id).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="only the server that generates a response can stream its events"):
        list(there.retrieve(begun.id, stream=True))
    with pytest.raises(openai.BadRequestError, match="the previous response is"):
        answer(pair.second, previous_response_id=begun.id)
    if end == "cancel":
        assert there.cancel(begun.id).status == "cancelled"
        assert [server.client.responses.retrieve(begun.id).status for server in pair] == ["cancelled"] * 2
    else:
        there.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            pair.first.client.responses.retrieve(begun.id)
    until(lambda: not pair.first.state.has_work)


@pytest.mark.usefixtures("gate")
def test_a_key_has_its_background_responses_at_all_servers_together(scripted: Scripted, state_url: str) -> None:
    scripted.follow()
    options: Any = {"state_url": state_url, "max_background_responses": 1, "state_heartbeat": 0.1, "api_key": ("few",)}
    with running(scripted.llm, **options) as first, running(scripted.llm, **options) as second:
        begun = answer(first, background=True, **LONG)
        with pytest.raises(openai.RateLimitError, match="this one has 1"):
            answer(second, background=True, **LONG)
        second.client.responses.cancel(begun.id)


@pytest.mark.usefixtures("gate")
def test_a_response_whose_server_is_lost_fails_by_name_and_is_never_in_progress_again(
    pair: Pair, scripted: Scripted
) -> None:
    scripted.follow()
    begun = answer(pair.first, background=True, **LONG)
    mine = ResponseRow.id == begun.id
    with_lost = update(ResponseRow).where(mine).values(server_id="lost")
    pair.first.service.database.run_now(lambda session: session.execute(with_lost))
    seen: Any = pair.second.client.responses.retrieve(begun.id)
    assert (seen.status, seen.error.code) == ("failed", "server_lost")
    until(lambda: not pair.first.state.has_work)  # it has heard of it
    until(lambda: pair.first.client.responses.retrieve(begun.id).status == "failed")  # and stored it
    for server in pair:
        last: Any = server.client.responses.retrieve(begun.id)
        assert (last.status, last.error.code) == ("failed", "server_lost")


@pytest.mark.usefixtures("gate")
def test_a_response_that_begins_during_a_heartbeat_is_not_taken_for_a_deleted_one(
    pair: Pair, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, has_read, beat, insert = pair.first.service, threading.Event(), upkeep.beat, response_rows.insert_response
    beats_of_open = list[Heartbeat]()

    def slow_beat(session: Session, server: ServerClock, of_server: Container[str]) -> Heartbeat:
        heartbeat = beat(session, server, of_server)
        if server is mine.server and mine.responses.open and not has_read.is_set():
            session.commit()
            has_read.set()
            until(lambda: bool(mine.responses.inserted()))
        if server is mine.server and mine.responses.open:
            beats_of_open.append(heartbeat)
        return heartbeat

    def late_insert(*arguments: Any, **more: Any) -> int:
        assert has_read.wait(60)
        return insert(*arguments, **more)

    monkeypatch.setattr(upkeep, "beat", slow_beat)
    monkeypatch.setattr(response_rows, "insert_response", late_insert)
    scripted.follow()
    begun = answer(pair.first, background=True, **LONG)
    assert len(mine.responses.inserted()) == 1
    until(lambda: len(beats_of_open) > 3)  # so that two of them have been heard
    assert pair.first.client.responses.retrieve(begun.id).status == "in_progress"
    pair.first.client.responses.cancel(begun.id)


def test_a_response_expires_at_all_servers_and_its_row_is_removed(
    pair: Pair, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "23." + END)
    done = answer(pair.first)
    mine, database = ResponseRow.id == done.id, pair.first.service.database
    database.run_now(
        lambda session: session.execute(update(ResponseRow).where(mine).values(expires_at=time.time() - 1))
    )
    for server in pair:
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(done.id)
    monkeypatch.setattr("jinfercept.state.heartbeats._SWEEP_S", 0.0)
    until(lambda: database.run_now(lambda session: session.scalar(select(ResponseRow.id).where(mine))) is None)


@pytest.mark.usefixtures("patient")
def test_a_wall_clock_that_is_wrong_for_a_while_removes_nothing(
    scripted: Scripted, state_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps = list[float]()
    sweep, wall_s = upkeep.sweep, time.time

    def counted(*arguments: Any) -> bool:
        sweeps.append(wall_s())
        return sweep(*arguments)

    monkeypatch.setattr(upkeep, "sweep", counted)
    monkeypatch.setattr("jinfercept.state.heartbeats._SWEEP_S", 0.0)

    def is_kept(server: Running) -> bool:
        """Whether everything is there, after some sweeps."""
        end = len(sweeps) + 1
        until(lambda: len(sweeps) > end)
        server.http.get(f"/v1/conversations/{talk.id}").raise_for_status()
        return server.client.responses.retrieve(done.id) == done

    says(scripted, "23." + END)
    options: Any = {"state_url": state_path, "state_heartbeat": 0.05}
    with running(scripted.llm, **options) as server:
        done, talk = answer(server), server.client.conversations.create()
        for days in (2, 0, -2, 2):
            monkeypatch.setattr(time, "time", lambda days=days: wall_s() + 86400.0 * days)
            assert is_kept(server), f"{days} days ahead"
    for days in (2, 0):
        monkeypatch.setattr(time, "time", lambda days=days: wall_s() + 86400.0 * days)
        with running(scripted.llm, **options) as server:
            assert is_kept(server), f"{days} days ahead at a start"


@pytest.mark.parametrize("seconds", [0.0, 1800.0])
def test_a_leap_of_the_clock_that_lasts_is_the_time(seconds: float) -> None:
    now = [0.0]
    clock = TrustedClock(lambda: now[0])
    assert clock.read(1000.0, stored_s=10.0) == 1000.0, "after a pause of some minutes"
    assert clock.read(1020.0) == 1020.0
    leap = 90_000.0
    for now[0] in (1.0, 1800.0, 3600.0):
        assert clock.read(1020.0 + leap + now[0]) == pytest.approx(1020.0 + now[0])
    now[0] = 3601.0 + seconds
    assert clock.read(1020.0 + leap + now[0]) == 1020.0 + leap + now[0]
    assert clock.read(1020.0) == 1020.0, "and back"


@pytest.mark.usefixtures("gate")
def test_nothing_is_left_open_when_servers_end(
    scripted: Scripted, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jinfercept.server.service._ENDING_S", 60.0)  # for a busy machine
    scripted.follow()
    with running(scripted.llm, state_url=state_url, drain_timeout=0.0) as server:
        begun = answer(server, background=True, **LONG)
    with running(scripted.llm, state_url=state_url) as server:
        seen: Any = server.client.responses.retrieve(begun.id)
        assert (seen.status, seen.error.code) == ("failed", "server_error")
        statuses = select(ResponseRow.status).where(ResponseRow.id == begun.id)
        assert server.service.database.run_now(lambda session: session.scalar(statuses)) == "failed"


@contextmanager
def locked(path: str, database: StateDatabase) -> Iterator[None]:
    """A database that answers no writer, on which a server does not wait for long."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    patience_s, database._timeout_s = database._timeout_s, 0.3
    try:
        yield
    finally:
        database._timeout_s = patience_s
        other.execute("ROLLBACK")
        other.close()


def test_a_database_that_does_not_answer_is_503_by_name_and_what_is_not_stored_goes_on(
    scripted: Scripted, state_path: str
) -> None:
    says(scripted, "23." + END)
    with running(scripted.llm, state_url=state_path, state_timeout=0.3, state_heartbeat=0.1) as server:
        server.service.database._timeout_s = 60.0  # but while it is locked
        with locked(state_path, server.service.database):
            refused = server.http.post("/v1/responses", json={"input": QUESTION, "temperature": 0})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
            assert refused.headers["retry-after"] == "1"
            assert answer(server, store=False).output_text == "23."
            assert server.chat().status_code == 200
        assert answer(server).output_text == "23."


def test_a_response_ends_as_failed_if_its_end_cannot_be_stored_and_one_in_the_background_waits(
    scripted: Scripted, gate: Gate, state_path: str
) -> None:
    text = "It costs 23. " * 40
    says(scripted, text + END)
    with running(scripted.llm, state_url=state_path, state_timeout=0.3, state_heartbeat=0.1) as server:
        server.service.database._timeout_s = 60.0  # but while it is locked
        events = iter(answer(server, stream=True))
        connected = next(events).response.id
        begun = answer(server, background=True)
        with locked(state_path, server.service.database):
            gate.open()
            last = list(events)[-1]
            assert (last.type, last.response.error.code) == ("response.failed", "state_unavailable")
            until(lambda: not server.state.has_work)
        until(lambda: server.client.responses.retrieve(begun.id).status == "completed")
        done: Any = server.client.responses.retrieve(begun.id)
        assert done.output_text == text
        assert server.client.responses.retrieve(connected).status == "failed"
        rows = select(ResponseRow.status).where(ResponseRow.id == connected)
        until(lambda: server.service.database.run_now(lambda session: session.scalar(rows)) == "failed")
