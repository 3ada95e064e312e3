"""The database of the stored state: opened, refused, and gone for a while."""

import asyncio
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.protocols.errors import ApiError
from jinfercept.state.database import StateDatabase
from jinfercept.state.entries import Entries
from jinfercept.state.store import StateStore
from tests.support.postgres import Postgres


def look(entries: Entries) -> object:
    return entries.find(f"resp_{'0' * 32}", "")


def test_servers_that_start_at_once_create_the_tables_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as starts:
        for database in list(starts.map(StateDatabase, [str(tmp_path / "state.db")] * 4)):
            database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me:hunter2@host/db", "not supported"),
        ("oracle+nothing://me:hunter2@host/db", "not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://me:hunter2@host:port/db", "not a URL"),
        ("postgresql://me:hunter2@127.0.0.1:1/db", "cannot be opened"),
        ("postgresql://me@127.0.0.1:1/db?password=hunter2&sslpassword=hunter2", "cannot be opened"),
        ("postgresql://me:a@hunter2@127.0.0.1:1/db", "more than one @"),
        ("postgresql:me:hunter2@host/db", "not a URL"),
        ("mysql+hunter2://host/db", "not supported"),
        ("sqlite://hunter2/state.db", "a SQLite URL may have only a path"),
        ("sqlite:///state.db?timeout=hunter2", "a SQLite URL may have only a path"),
        ("/no/such/folder/state.db", "cannot be written"),
        ("a\0b", "cannot be written"),
        ("\udcff.db", "not a URL"),
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
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'jinfercept\[postgresql\]'") as refused:
        StateDatabase("postgresql://me:hunter2@host/db")
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


def test_work_that_ended_is_no_503_where_the_event_loop_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, ended = StateDatabase(str(tmp_path / "state.db"), timeout_s=60.0), threading.Event()

    async def tried() -> None:
        state, loop = StateStore(database, 9), asyncio.get_running_loop()
        run = state._threads.run

        def noted(tenant: str, num_bytes: int, work: Callable[[], object]) -> Any:
            return run(tenant, num_bytes, lambda: (work(), ended.set()))

        monkeypatch.setattr(state._threads, "run", noted)
        running = asyncio.ensure_future(state.run("me", lambda entries: "stored"))
        await asyncio.sleep(0)
        assert ended.wait(60)
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 100.0)  # so long it was held up
        assert await running == "stored"
        await state.close(1.0)

    asyncio.run(tried())
    database.close()


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


def test_a_file_that_is_moved_away_takes_no_more_writes_until_it_is_back(tmp_path: Path) -> None:
    path, moved = tmp_path / "state.db", tmp_path / "moved.db"
    database = StateDatabase(str(path), timeout_s=0.2)
    try:
        path.rename(moved)
        for writes in (True, False):
            with pytest.raises(ApiError, match="does not answer") as refused:
                database.transact(look, writes=writes)
            assert (refused.value.status_code, refused.value.code) == (503, "state_unavailable")
        path.touch()
        with pytest.raises(ApiError, match="does not answer"):
            database.transact(look)
        moved.rename(path)
        assert database.transact(look) is None
    finally:
        database.close()


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
