"""Stored state on a full disk: what is stored is read and deleted, nothing new is stored, and a start says why it fails."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy.orm import Session

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import new_item
from jinfercept.state import response_rows, upkeep
from jinfercept.state.database import StateDatabase
from jinfercept.state.queries import ServerClock
from jinfercept.state.response_rows import ResponseDocuments
from jinfercept.state.upkeep import StateLimits
from tests.support.http_errors import shape
from tests.support.live_server import END, running
from tests.support.responses import QUESTION, answer, says
from tests.support.scripted_model import Scripted
from tests.support.small_disk import SmallDisk, small_disk

SERVER = ServerClock("here", 60.0)
TEXT = "a text " * 8000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of two MiB."""
    with small_disk(tmp_path) as mounted:
        yield mounted


@contextmanager
def short_files(num_bytes: int) -> Iterator[None]:
    """A limit of the size of this process's files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def _insert(database: StateDatabase, number: int) -> str:
    """Store a response that has ended; returns its id. Raises `ApiError`."""
    name = f"resp_{number:032x}"
    response = {"id": name, "status": "completed", "background": False, "created_at": 1, "previous_response_id": None}
    documents = ResponseDocuments(response | {"output": []}, [new_item("message", role="user", content=TEXT)])

    def insert(session: Session) -> object:
        return response_rows.insert_response(session, SERVER, "me", documents, ttl_s=100.0, most_background=9)

    await database.run("me", insert, len(TEXT))
    return name


async def _insert_until_full(database: StateDatabase) -> list[str]:
    names = list[str]()
    refusals = list[ApiError]()
    while not refusals:
        try:
            names.append(await _insert(database, len(names)))
        except ApiError as refused:
            refusals.append(refused)
        assert len(names) < 1000
    assert (refusals[0].status_code, refusals[0].code) == (503, "state_full")
    return names


async def _fill_and_delete(path: Path) -> None:
    database = StateDatabase(str(path))
    try:
        names = await _insert_until_full(database)
        assert len(names) > 4
        rows = await database.run("me", lambda session: response_rows.read_responses(session, names), only_reads=True)
        assert list(rows) == names
        database.run_now(lambda session: upkeep.beat(session, SERVER, ()), frees=True)
        for name in names:
            delete = partial(response_rows.delete_response, response_id=name, tenant="me")
            await database.run("me", delete, frees=True)
        assert len(await _insert_until_full(database)) > len(names) // 2
        database.run_now(lambda session: upkeep.sweep(session, SERVER, StateLimits(0, None)), frees=True)
        await _insert(database, 0)
    finally:
        database.close()


def test_responses_that_fill_a_disk_are_read_and_deleted_and_make_room_for_others(disk: SmallDisk) -> None:
    asyncio.run(_fill_and_delete(disk.state))


def test_a_limit_of_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    with short_files(2**20):
        asyncio.run(_fill_and_delete(tmp_path / "state.db"))


def test_what_is_stored_is_deleted_while_another_program_fills_the_disk(scripted: Scripted, disk: SmallDisk) -> None:
    says(scripted, "23." + END)
    long: Any = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with running(scripted.llm, state_url=str(disk.state), state_heartbeat=60.0) as server:
        responses: Any = server.client.responses
        conversations: Any = server.client.conversations
        done = answer(server)
        talk = conversations.create(items=[{"role": "user", "content": TEXT}, {"role": "user", "content": "Hi"}])
        [*_, item] = conversations.items.list(talk.id, order="asc").data
        begun = answer(server, "Tell me more", background=True, **long)
        disk.fill()
        for path, body in (("/v1/responses", {"input": QUESTION}), ("/v1/conversations", {})):
            assert shape(server.http.post(path, json=body)) == (503, "state_full")
        assert answer(server, store=False).output_text == "23."
        assert responses.retrieve(done.id).output_text == "23."
        ended = responses.cancel(begun.id)
        assert (ended.status, ended.error.code) == ("failed", "state_full")
        rows = server.service.database.run_now(lambda session: response_rows.read_responses(session, [begun.id]))
        row = rows[begun.id].response
        assert (row["status"], row["error"]["code"]) == ("failed", "state_full")
        assert conversations.items.delete(item.id, conversation_id=talk.id).id == talk.id
        assert conversations.delete(talk.id).deleted
        for name in (done.id, begun.id):
            responses.delete(name)
            with pytest.raises(openai.NotFoundError):
                responses.retrieve(name)
        disk.empty()
        assert answer(server).output_text == "23."


def test_a_start_on_a_full_disk_ends_by_name_before_the_model_is_loaded(
    disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_new in (True, False):
        if not is_new:
            disk.empty()
            StateDatabase(str(disk.state)).close()
        disk.fill()
        with pytest.raises(ConfigError, match="the disk of the stored state is full"):
            StateDatabase(str(disk.state))
    assert main(["serve", "no/such/folder/model", "--port", "0", "--state-url", str(disk.state)]) == 2
    assert "the disk of the stored state is full" in capsys.readouterr().err
    disk.make_read_only()
    with pytest.raises(ConfigError, match="cannot be written"):
        StateDatabase(str(disk.state))
