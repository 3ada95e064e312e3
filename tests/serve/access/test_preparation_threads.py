"""Preparation threads: keys do not delay each other, abandoned work does not begin, and a drain ends all work."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.serve.access.key_limits import HEAVY_BYTES, MAX_WAITING_BYTES, FairThreadPool
from jinfercept.serve.protocols.errors import ApiError
from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted

LARGE = HEAVY_BYTES + 1
HELD = "hold this"


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def with_pool(use: Callable[[FairThreadPool, threading.Event], Coroutine[Any, Any, None]], most: int = 8) -> None:
    """Run a test on an event loop; the event that its jobs may wait for is set at the end."""

    async def run() -> None:
        pool, released = FairThreadPool(most), threading.Event()
        try:
            await use(pool, released)
        finally:
            released.set()
            pool.close()

    asyncio.run(run())


def test_heavy_work_holds_up_no_light_work_of_any_key() -> None:
    async def use(pool: FairThreadPool, released: threading.Event) -> None:
        heavy = [asyncio.ensure_future(pool.run(key, LARGE, released.wait)) for key in ("one", "two", "three")]
        await settle()
        assert await pool.run("one", 10, lambda: "done") == "done"
        assert not any(task.done() for task in heavy)

    with_pool(use)


def test_keys_take_turns() -> None:
    async def use(pool: FairThreadPool, released: threading.Event) -> None:
        order = list[str]()
        blocked = [asyncio.ensure_future(pool.run(key, LARGE, released.wait)) for key in ("a", "b")]
        await settle()
        tasks = [asyncio.ensure_future(pool.run(key, LARGE, lambda key=key: order.append(key))) for key in "aaaabbc"]
        await settle()
        released.set()
        await asyncio.gather(*blocked, *tasks)
        assert order.index("c") < 5  # two threads note what they have run, in either order
        assert order.index("b") < 6

    with_pool(use)


def test_what_one_key_has_waiting_is_bounded() -> None:
    async def use(pool: FairThreadPool, released: threading.Event) -> None:
        async def refused(key: str, size: int) -> int:
            with pytest.raises(ApiError) as error:
                await pool.run(key, size, released.wait)
            assert error.value.headers
            assert int(error.value.headers["Retry-After"]) > 0
            return error.value.status_code

        many = [asyncio.ensure_future(pool.run("one", LARGE, released.wait)) for _ in range(1 + 8)]
        large = [asyncio.ensure_future(pool.run("two", MAX_WAITING_BYTES, released.wait)) for _ in range(1 + 1)]
        await settle()
        assert await refused("one", LARGE) == 429
        assert await refused("two", LARGE) == 429
        for task in (*many, *large):
            task.cancel()
        await settle()
        released.set()
        assert await pool.run("one", LARGE, lambda: "done") == "done"

    with_pool(use)


def test_a_failure_is_the_caller_s_and_takes_no_thread_with_it() -> None:
    async def use(pool: FairThreadPool, released: threading.Event) -> None:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await pool.run("one", LARGE, lambda: 1 // 0)
        assert await pool.run("one", LARGE, lambda: "done") == "done"

    with_pool(use)


class Holding:
    """Tokenisation of one text that waits until it is released.

    Attributes:
        begun: texts whose tokenisation has begun and is held.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.released = threading.Event()


@contextmanager
def held_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    encode, holding = Tokenizer.encode, Holding()

    def encode_held_back(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        if text.startswith(HELD):
            holding.begun.append(text[:20])
            assert holding.released.wait(60)
        return encode(self, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", encode_held_back)
    try:
        yield holding
    finally:
        holding.released.set()


def send(server: Running, key: str, text: str) -> HTTPConnection:
    """A request whose answer is not read yet."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/tokenize", json.dumps({"prompt": text}), headers)
    return connection


def ask(server: Running, key: str, text: str) -> httpx2.Response:
    return server.http.post("/tokenize", json={"prompt": text}, headers={"authorization": f"Bearer {key}"})


def test_a_client_with_long_texts_holds_up_no_other_and_leaves_nothing_behind(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = "x" * LARGE
    limits = {"api_key": ("one", "two"), "max_prompt_chars": 10 * LARGE}
    with running(scripted.llm, **limits) as server, held_texts(monkeypatch) as holding:
        connections = [send(server, "one", f"{HELD} {number} {padding}") for number in range(4)]
        until(lambda: len(holding.begun) == 1)
        assert ask(server, "two", "short").status_code == 200
        assert ask(server, "two", padding).status_code == 200
        assert ask(server, "one", "short").status_code == 200
        for connection in connections:
            connection.close()
        until(lambda: len(server.server.server_state.connections) == 1)
        assert ask(server, "two", "short").status_code == 200  # the loop has seen to those that are gone
        holding.released.set()
        assert ask(server, "one", padding).status_code == 200
        assert len(holding.begun) == 1


def test_at_the_end_of_a_drain_what_is_prepared_is_503(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(scripted.llm, drain_timeout=0.1, max_prompt_chars=10 * LARGE) as server,
        held_texts(monkeypatch) as holding,
    ):
        connections = [send(server, "none", HELD + "x" * LARGE * (number % 2)) for number in range(6)]
        until(lambda: len(holding.begun) >= 3)
        server.server.handle_exit(signal.SIGTERM, None)
        assert [connection.getresponse().status for connection in connections] == [503] * 6


def test_what_was_prepared_when_a_drain_began_is_answered(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(scripted.llm, drain_timeout=60.0) as server, held_texts(monkeypatch) as holding:
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        body = json.dumps({"prompt": HELD, "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: len(holding.begun) == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.http.get("/ready").status_code == 503)
        holding.released.set()
        assert connection.getresponse().status == 200
