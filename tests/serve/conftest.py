"""A server for all tests of this folder, and one with tools of its own."""

from collections.abc import Iterator

import pytest

from tests.support.chat_templates import QWEN
from tests.support.live_server import Running
from tests.support.scripted_model import Make, Scripted
from tests.support.served import empty_tables as empty_tables
from tests.support.served import gate as gate
from tests.support.served import scripted as scripted
from tests.support.served import served as served
from tests.support.served import shared_server as shared_server
from tests.support.served import state_path as state_path
from tests.support.served import state_url as state_url
from tests.support.tool_server import shop


@pytest.fixture(autouse=True)
def _fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the cache of `/metrics`."""
    monkeypatch.setattr("jinfercept.serve.observe.metrics._FRESH_S", 0.0)


@pytest.fixture(scope="session")
def _shop(make_scripted: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with shop(make_scripted(QWEN), tmp_path_factory.mktemp("shop")) as server:
        yield server


@pytest.fixture
def server(scripted: Scripted, _shop: Running) -> Iterator[Running]:
    """A server with tools of its own (`shopkeeper`); afterwards its engine has to be idle."""
    yield _shop
    _shop.wait_idle()
