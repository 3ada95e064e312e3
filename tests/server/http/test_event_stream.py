"""Server-sent events: keep-alive comments, and clean-up after a disconnect."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jinfercept.protocols.encoding import encode_event
from jinfercept.server.http.access_log import DETAILS
from jinfercept.server.http.event_stream import EventStream


async def slow(go_on: asyncio.Event) -> AsyncGenerator[bytes]:
    yield encode_event({"n": 1})
    await go_on.wait()
    yield encode_event({"n": 2})


def test_comments_are_written_while_nothing_else_is() -> None:
    sent, commented = list[bytes](), asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent[-1].startswith(b":"):
            commented.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        await EventStream(slow(commented), keep_alive_s=0.01)({"type": "http", DETAILS: {}}, receive, send)
        await asyncio.sleep(0.05)

    asyncio.run(run())
    start, first, *comments, second, end = sent
    assert (start, first, second, end) == (b"", b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"")
    assert set(comments) == {b": keep-alive\n\n"}


def test_what_nobody_has_begun_to_read_is_closed_too() -> None:
    closed: list[bool] = []

    async def send(message: Any) -> None:
        raise OSError("the client has gone")

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def close() -> None:
        closed.append(True)

    async def run() -> None:
        with pytest.raises(OSError, match="gone"):
            await EventStream(slow(asyncio.Event()), close)({"type": "http", DETAILS: {}}, receive, send)

    asyncio.run(run())
    assert closed == [True]
