"""A server for all tests of this folder, with a model whose output each test writes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jinfercept.state.database import StateDatabase
from tests.support.chat_templates import QWEN
from tests.support.gate import Gate, closed_gate
from tests.support.live_server import Running, running
from tests.support.postgres import Postgres, postgres
from tests.support.scripted_model import Make, Scripted
from tests.support.tool_server import shop


@pytest.fixture(scope="session")
def _running(make_scripted: Make) -> Iterator[Running]:
    with running(make_scripted(QWEN).llm) as one:
        yield one


@pytest.fixture(autouse=True)
def _fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the cache of `/metrics`."""
    monkeypatch.setattr("jinfercept.server.observe.metrics._FRESH_S", 0.0)


@pytest.fixture
def scripted(_running: Running, make_scripted: Make) -> Scripted:
    """The model of the server: empty pages, a template with tools, no script yet."""
    _running.wait_idle()
    return make_scripted(QWEN)


@pytest.fixture
def gate(scripted: Scripted) -> Iterator[Gate]:
    """Keeps the model's long answers from their ends until the test opens it."""
    with closed_gate(scripted.llm) as gate:
        yield gate


@pytest.fixture
def served(scripted: Scripted, _running: Running) -> Iterator[Running]:
    """The server; afterwards its engine has to be idle."""
    yield _running
    _running.wait_idle()


@pytest.fixture(scope="session")
def _shop(make_scripted: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with shop(make_scripted(QWEN), tmp_path_factory.mktemp("shop")) as one:
        yield one


@pytest.fixture
def server(scripted: Scripted, _shop: Running) -> Iterator[Running]:
    """A server with tools of its own (`shopkeeper`); afterwards its engine has to be idle."""
    yield _shop
    _shop.wait_idle()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    with postgres() as one:
        yield one


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has servers with quick heartbeats miss many of them on a busy machine before they are lost."""
    monkeypatch.setattr("jinfercept.state.heartbeats.LOST_BEATS", 600)


@pytest.fixture(scope="session")
def _tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SQLite's with empty tables."""
    path = tmp_path_factory.mktemp("tables") / "state.db"
    StateDatabase(str(path)).close()
    return path


@pytest.fixture
def state_path(tmp_path: Path, _tables: Path) -> str:
    """A database in a file, with empty tables."""
    return str(shutil.copy(_tables, tmp_path / "state.db"))


@pytest.fixture(params=["sqlite", "postgresql"])
def state_url(request: pytest.FixtureRequest, _patient: None) -> str:
    """URL of a database for stored state; tests share PostgreSQL's tables."""
    if request.param == "sqlite":
        return request.getfixturevalue("state_path")
    server: Postgres = request.getfixturevalue("postgres_server")
    return server.url
