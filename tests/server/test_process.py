"""Collections of garbage do not visit what was there before a server began to serve."""

import gc
import sys
from collections.abc import Iterator

import pytest

from jinfercept.server import serve as serve_module
from jinfercept.server.process import frozen_heap


@pytest.fixture(autouse=True)
def _spared() -> Iterator[None]:
    """What hundreds of modules and other tests have left is visited neither here nor, as before, afterwards."""
    gc.freeze()
    yield
    gc.freeze()


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_objects_are_frozen_while_a_server_runs_and_collected_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(serve_module, "DrainingServer", lambda *_: type("Server", (), {"serve_until_signal": serving}))

    def serving() -> None:
        frozen.append(gc.get_freeze_count())

    interval = sys.getswitchinterval()
    serve_module.serve_app(None, None, None, lambda: None)  # pyright: ignore[reportArgumentType]
    assert frozen[0] > 10_000
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == (0, interval)


def test_garbage_that_is_made_while_the_heap_is_frozen_is_collected() -> None:
    with frozen_heap():
        _Cycle()
        assert gc.collect() >= 1
