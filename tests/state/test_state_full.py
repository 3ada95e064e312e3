"""Stored state on a full disk: what is stored is read, nothing new is stored, and a start says why it fails."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import new_item
from jinfercept.state.database import StateDatabase
from tests.support.gate import Gate
from tests.support.http_errors import shape
from tests.support.live_server import END, running, until
from tests.support.responses import QUESTION, answer, says
from tests.support.scripted_model import Scripted
from tests.support.small_disk import SmallDisk, small_disk

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


def fill_and_read(path: Path) -> None:
    database, names = StateDatabase(str(path)), list[str]()
    items = [new_item("message", role="user", content=TEXT)]
    try:

        def insert_all() -> None:
            while len(names) < 1000:
                name = f"resp_{len(names):032x}"
                database.transact(lambda entries, name=name: entries.insert(name, "me", {}, items))
                names.append(name)

        with pytest.raises(ApiError) as refused:
            insert_all()
        assert (refused.value.status_code, refused.value.code) == (503, "state_full")
        assert len(names) > 4
        kept = database.transact(lambda entries: entries.items_of(names), writes=False)
        assert all(kept[name].outputs == items for name in names)
    finally:
        database.close()


def test_responses_that_fill_a_disk_are_all_there(disk: SmallDisk) -> None:
    fill_and_read(disk.state)


def test_a_limit_of_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    with short_files(2**20):
        fill_and_read(tmp_path / "state.db")


def test_on_a_full_disk_what_stores_is_503_by_name_and_all_else_goes_on(
    scripted: Scripted, gate: Gate, disk: SmallDisk
) -> None:
    says(scripted, "It costs 23. " * 40 + END)
    with running(scripted.llm, state_url=str(disk.state)) as server:
        responses: Any = server.client.responses
        events = iter(answer(server, stream=True))
        connected = next(events).response.id
        disk.fill()
        gate.open()
        last = list(events)[-1]
        assert (last.type, last.response.error.code) == ("response.failed", "state_full")
        for path, body in (("/v1/responses", {"input": QUESTION}), ("/v1/conversations", {})):
            assert shape(server.http.post(path, json=body)) == (503, "state_full")
        assert answer(server, store=False).status == "completed"
        disk.empty()
        done = answer(server)
        assert responses.retrieve(done.id) == done
        server.service.database.transact(_lapse)
        until(lambda: responses.retrieve(connected).status == "failed")


def _lapse(entries: Any) -> None:
    entries._wall_s += 100.0
    entries.end_lost()


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
