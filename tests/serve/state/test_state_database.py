"""The database of the stored state: opened, refused, gone for a while, and on a full disk."""

import asyncio
import logging
import os
import resource
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import new_item
from jinfercept.serve.state.database import StateDatabase
from jinfercept.serve.state.entries import Entries
from jinfercept.serve.state.store import StateStore
from tests.support.gate import Gate
from tests.support.live_server import END, running
from tests.support.postgres import Postgres
from tests.support.pretend import missing
from tests.support.responses import QUESTION, answer, says
from tests.support.scripted_model import Scripted
from tests.support.served import shape

WRONG = "state_url is no path, and no URL that is supported"


def look(entries: Entries) -> object:
    return entries.find(f"resp_{'0' * 32}", "")


def test_servers_that_start_at_once_create_the_tables_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as starts:
        for database in list(starts.map(StateDatabase, [str(tmp_path / "state.db")] * 4)):
            database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me:hunter2@host/db", "needs one more package; got mysql"),
        ("oracle+nothing://me:hunter2@host/db", "needs one more package; got oracle"),
        ("sqlite://", WRONG),
        ("sqlite:///:memory:", WRONG),
        ("postgresql+psycopg://me:hunter2@host:port/db", WRONG),
        ("postgresql+psycopg://me:hunter2@127.0.0.1:1/db", "cannot be opened"),
        ("postgresql+psycopg://me@127.0.0.1:1/db?password=hunter2&sslpassword=hunter2", "cannot be opened"),
        ("postgresql+psycopg://me:a@hunter2@127.0.0.1:1/db", WRONG),
        ("postgresql:me:hunter2@host/db", WRONG),
        ("mysql+hunter2://host/db", "needs one more package"),
        ("sqlite://hunter2/state.db", WRONG),
        ("sqlite:///state.db?timeout=hunter2", WRONG),
        ("/no/such/folder/state.db", "cannot be written"),
        ("a\0b", "cannot be written"),
        ("\udcff.db", WRONG),
    ],
)
def test_a_url_that_cannot_be_used_is_an_error_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        StateDatabase(url, timeout_s=0.2)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_path_that_is_no_database_of_the_server_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no database " * 1000)
    StateDatabase(str(tmp_path / "cut")).close()
    os.truncate(tmp_path / "cut", 20_000)
    with closing(sqlite3.connect(tmp_path / "foreign")) as foreign:
        foreign.execute("CREATE TABLE responses (id INTEGER)")
    for name, why in (
        ("folder", "cannot be written.*directory"),
        ("pipe", "cannot be written.*no file"),
        ("text", "not a database"),
        ("cut", "malformed"),
        ("foreign", "belongs to another program.*tables responses"),
    ):
        with pytest.raises(ConfigError, match=why):
            StateDatabase(str(tmp_path / name), timeout_s=0.2)


def test_a_database_that_another_program_has_locked_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    StateDatabase(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigError, match="is locked"):
            StateDatabase(path, timeout_s=0.2)


def test_without_its_package_postgresql_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "psycopg")
    with pytest.raises(ConfigError, match=r"pip install 'jinfercept\[postgresql\]'") as refused:
        StateDatabase("postgresql+psycopg://me:hunter2@host/db")
    assert "hunter2" not in str(refused.value)


def test_a_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    StateDatabase(str(tmp_path / "state.db")).close()
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


def test_work_waits_for_a_lock_and_then_is_503_by_name_while_others_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "state.db")
    database = StateDatabase(path, timeout_s=0.2)

    async def tried() -> None:
        state = StateStore(database, 9)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ApiError) as refused:
                await state.run("me", look)
            assert (refused.value.status_code, refused.value.code) == (503, "state_unavailable")
            assert refused.value.headers == {"Retry-After": "1"}
            assert await state.run("me", look, writes=False) is None  # readers do not wait
            other.execute("ROLLBACK")
        assert await state.run("me", look) is None
        await state.close(1.0)

    asyncio.run(tried())
    database.close()
    assert "database is locked" in caplog.text


def test_a_key_with_much_waiting_work_is_429_and_others_are_served(tmp_path: Path) -> None:
    database, go = StateDatabase(str(tmp_path / "state.db"), timeout_s=60.0), threading.Event()

    async def tried() -> None:
        state = StateStore(database, 9)
        slow = [asyncio.ensure_future(state.run("greedy", lambda entries: go.wait(60))) for _ in range(400)]
        await asyncio.sleep(0)
        assert await state.run("modest", lambda entries: "served", writes=False) == "served"
        go.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
        refused = [error for error in ends if isinstance(error, ApiError)]
        assert {error.status_code for error in refused} == {429}
        assert 100 < len(refused) < 200
        await state.close(1.0)

    asyncio.run(tried())
    database.close()


@pytest.mark.slow
def test_a_postgresql_that_stops_or_hangs_is_503_until_it_answers_again(
    postgres_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    database = StateDatabase(postgres_server.url, timeout_s=0.5)

    async def tried() -> None:
        state = StateStore(database, 9)

        async def answers() -> None:
            while True:  # a busy machine is late
                try:
                    assert await state.run("me", look) is None
                    return
                except ApiError:
                    continue

        await answers()
        postgres_server.stop()
        with pytest.raises(ApiError, match="does not answer"):
            await state.run("me", look)
        await asyncio.to_thread(postgres_server.start)
        await answers()
        postgres_server.pause()
        try:
            with pytest.raises(ApiError, match="does not answer"):
                await state.run("me", look)
        finally:
            postgres_server.resume()
        await answers()
        await state.close(1.0)

    asyncio.run(tried())
    database.close()
    assert "secret-word" not in caplog.text


def test_a_database_is_the_same_file_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    database = StateDatabase("state.db")
    monkeypatch.chdir(tmp_path / "other")
    assert database.transact(look) is None
    database.close()
    assert not (tmp_path / "other" / "state.db").exists()


@dataclass(frozen=True)
class SmallDisk:
    """The file system.

    Attributes:
        folder: where it is mounted.
    """

    folder: Path

    @property
    def state(self) -> Path:
        """A file for stored state."""
        return self.folder / "state.db"

    def fill(self) -> None:
        """Take all room that is left, also that of SQLite's log."""
        if self.state.exists():
            with closing(sqlite3.connect(self.state)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._write()  # before the log is removed with the last connection
        self._write()

    def _write(self) -> None:
        with suppress(OSError), (self.folder / "other").open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Give the room back."""
        os.truncate(self.folder / "other", 0)

    def make_read_only(self) -> None:
        """Allow no more writes."""
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount the file system; skips the test where that is refused."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


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
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(connected)


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
