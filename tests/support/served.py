"""Fixtures of tests that serve: a server for all of them, with a model whose output each test writes, and databases for it.

The `conftest.py` of a folder imports those that its tests use.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfercept.serve.state.database import StateDatabase
from tests.support.chat_templates import QWEN
from tests.support.gate import Gate, closed_gate
from tests.support.live_server import Running, running
from tests.support.postgres import Postgres
from tests.support.scripted_model import Make, Scripted


@pytest.fixture(scope="session")
def shared_server(make_scripted: Make) -> Iterator[Running]:
    with running(make_scripted(QWEN).llm) as server:
        yield server


@pytest.fixture
def scripted(shared_server: Running, make_scripted: Make) -> Scripted:
    """The model of the server: empty pages, a template with tools, no script yet."""
    shared_server.wait_idle()
    return make_scripted(QWEN)


@pytest.fixture
def gate(scripted: Scripted) -> Iterator[Gate]:
    """Keeps the model's long answers from their ends until the test opens it."""
    with closed_gate(scripted.llm) as gate:
        yield gate


@pytest.fixture
def served(scripted: Scripted, shared_server: Running) -> Iterator[Running]:
    """The server; afterwards its engine has to be idle."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture(scope="session")
def empty_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SQLite's with empty tables."""
    path = tmp_path_factory.mktemp("tables") / "state.db"
    StateDatabase(str(path)).close()
    return path


@pytest.fixture
def state_path(tmp_path: Path, empty_tables: Path) -> str:
    """A database in a file, with empty tables."""
    return str(shutil.copy(empty_tables, tmp_path / "state.db"))


@pytest.fixture(params=["sqlite", "postgresql"])
def state_url(request: pytest.FixtureRequest) -> str:
    """URL of a database for stored state; tests share PostgreSQL's tables."""
    if request.param == "sqlite":
        return request.getfixturevalue("state_path")
    server: Postgres = request.getfixturevalue("postgres_server")
    return server.url


CHAT = "/v1/chat/completions"

JSON = {"content-type": "application/json"}

SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {},
    "/detokenize": {},
}


def shape(answer: Any) -> tuple[int, Any]:
    """Status and code of an answer, whose body has to be an error object."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]
