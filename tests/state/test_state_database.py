"""The database of the stored state: opened, migrated, refused, and gone for a while."""

import asyncio
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from jinfercept.errors import ConfigError
from jinfercept.protocols.errors import ApiError
from jinfercept.state.database import StateDatabase
from jinfercept.state.heartbeats import StateUpkeep, new_server
from jinfercept.state.tables import StateTable
from jinfercept.state.upkeep import StateLimits
from tests.support.live_server import until
from tests.support.postgres import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield str(tmp_path / "state.db")
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    with create_engine(_driven(server.url), isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("DROP DATABASE IF EXISTS empty"))
        connection.execute(text("CREATE DATABASE empty"))
    yield server.url.replace("/postgres", "/empty").replace("postgresql:empty", "postgresql:")


def _driven(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:") if "://" in url else f"sqlite:///{url}"


def test_servers_that_start_at_once_migrate_once_to_the_tables_of_the_code(empty_url: str) -> None:
    with ThreadPoolExecutor(4) as starts:
        for database in list(starts.map(StateDatabase, [empty_url] * 4)):
            database.close()
    engine = create_engine(_driven(empty_url))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), StateTable.metadata) == []
    engine.dispose()


def test_tables_of_a_newer_version_are_refused_by_name(empty_url: str) -> None:
    StateDatabase(empty_url).close()
    engine = create_engine(_driven(empty_url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"newer version of jinfercept.*revision 9999"):
        StateDatabase(empty_url)


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


def test_work_waits_for_a_lock_and_then_is_503_by_name_while_the_event_loop_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    database = StateDatabase(path, timeout_s=0.2)
    engine = create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False})

    def look(session: Session) -> Any:
        return session.scalar(text("SELECT 1"))

    async def with_turns(work: Any, fifth: Callable[[], object]) -> None:
        """Await work while the event loop takes turns, and call a function after five of them."""
        turns, waiting = 0, asyncio.ensure_future(work)
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0.005)
            if turns == 5:
                fifth()
        waiting.result()
        assert turns >= 5

    async def tried() -> None:
        with engine.connect() as other:
            other.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(ApiError) as refused:
                await database.run("me", look)
            assert (refused.value.status_code, refused.value.code) == (503, "state_unavailable")
            assert refused.value.headers == {"Retry-After": "1"}
            database._timeout_s = 60.0
            await database.run("me", look, only_reads=True)  # readers do not wait
            await with_turns(database.run("me", look), lambda: other.exec_driver_sql("ROLLBACK"))

    asyncio.run(tried())
    engine.dispose()
    database.close()


def test_work_that_ends_late_is_503_and_not_committed(tmp_path: Path) -> None:
    database = StateDatabase(str(tmp_path / "state.db"), timeout_s=0.1)
    database.run_now(lambda session: session.execute(text("CREATE TABLE seen (number INTEGER)")))

    def write(session: Session) -> None:
        session.execute(text("INSERT INTO seen VALUES (1)"))
        time.sleep(0.15)

    with pytest.raises(ApiError, match="does not answer"):
        asyncio.run(database.run("me", write))
    assert database.run_now(lambda session: session.scalar(text("SELECT count(*) FROM seen"))) == 0
    database.close()


def test_work_that_ended_in_time_is_no_503_where_the_event_loop_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, ended = StateDatabase(str(tmp_path / "state.db"), timeout_s=60.0), threading.Event()
    run = database._threads.run

    def told(tenant: str, num_bytes: int, work: Callable[[], object]) -> Any:
        return run(tenant, num_bytes, lambda: (work(), ended.set()))

    async def tried() -> None:
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(database.run("me", lambda session: "stored"))
        await asyncio.sleep(0)
        assert ended.wait(60)
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 100.0)  # so long it was held up
        assert await running == "stored"

    monkeypatch.setattr(database._threads, "run", told)

    asyncio.run(tried())
    database.close()


def test_a_key_with_much_waiting_work_is_429_and_others_are_served(tmp_path: Path) -> None:
    database, go = StateDatabase(str(tmp_path / "state.db"), timeout_s=60.0), threading.Event()

    async def tried() -> None:
        slow = [asyncio.ensure_future(database.run("greedy", lambda session: go.wait(60))) for _ in range(400)]
        await asyncio.sleep(0)
        assert await database.run("modest", lambda session: "served", only_reads=True) == "served"
        go.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
        refused = [error for error in ends if isinstance(error, ApiError)]
        assert {error.status_code for error in refused} == {429}
        assert 100 < len(refused) < 200

    asyncio.run(tried())
    database.close()


@pytest.mark.slow
def test_a_postgresql_that_crashes_or_hangs_is_503_until_it_answers_again(
    postgres_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())
    database = StateDatabase(postgres_server.url, timeout_s=0.5)
    read = text("SELECT 1")

    async def tried() -> None:
        async def ask() -> Any:
            return await database.run("me", lambda session: session.scalar(read))

        async def answers() -> None:
            while True:  # work that began before the start is repeated, and a busy machine is late
                try:
                    assert await ask() == 1
                    return
                except ApiError:
                    continue

        await answers()
        postgres_server.stop()
        with pytest.raises(ApiError, match="does not answer"):
            await ask()
        starting = asyncio.get_running_loop().run_in_executor(None, postgres_server.start)
        await answers()
        await starting
        postgres_server.pause()
        try:
            with pytest.raises(ApiError, match="does not answer"):
                await ask()
        finally:
            postgres_server.resume()
        await answers()
        postgres_server.pause()
        try:
            with pytest.raises(ApiError, match="does not answer"):
                await ask()
            database.close()
            until(lambda: not any(thread.name.startswith("jinfercept-state") for thread in _new_threads(before)))
        finally:
            postgres_server.resume()

    asyncio.run(tried())
    assert "secret-word" not in caplog.text


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


def test_the_log_says_why_the_database_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = StateDatabase(str(tmp_path / "state.db"), timeout_s=0.2)
    responses: Any = SimpleNamespace(open={}, inserted=set)
    upkeep = StateUpkeep(database, new_server(0.01), responses, lambda: None, StateLimits(2**20, None), 0.01)
    database.run_now(lambda session: session.execute(text("DROP TABLE servers")))

    async def tried() -> None:
        upkeep.start()
        async with asyncio.timeout(60):
            while "the database of the stored state fails" not in caplog.text:
                await asyncio.sleep(0.005)
        await upkeep.stop(1.0)

    asyncio.run(tried())
    database.close()
    assert "no such table: servers" in caplog.text


def test_a_file_that_is_moved_away_takes_no_more_writes_until_it_is_back(tmp_path: Path) -> None:
    path, moved = tmp_path / "state.db", tmp_path / "moved.db"
    database = StateDatabase(str(path), timeout_s=0.2)
    try:
        path.rename(moved)
        for work in ("DELETE FROM servers", "SELECT 1"):
            with pytest.raises(OperationalError, match="was moved or replaced"):
                database.run_now(lambda session, work=work: session.execute(text(work)))
        with pytest.raises(ApiError, match="does not answer") as refused:
            asyncio.run(database.run("", lambda session: session.execute(text("SELECT 1"))))
        assert (refused.value.status_code, refused.value.code) == (503, "state_unavailable")
        path.touch()
        with pytest.raises(OperationalError, match="was moved or replaced"):
            database.run_now(lambda session: session.execute(text("SELECT 1")))
        moved.rename(path)
        assert database.run_now(lambda session: session.execute(text("SELECT 1")).scalar()) == 1
    finally:
        database.close()


def test_a_database_is_the_same_file_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    database = StateDatabase("state.db")
    monkeypatch.chdir(tmp_path / "other")
    assert asyncio.run(database.run("", lambda session: session.execute(text("SELECT 1")).scalar())) == 1
    database.close()
    assert not (tmp_path / "other" / "state.db").exists()
