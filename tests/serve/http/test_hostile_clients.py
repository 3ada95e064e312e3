"""Hostile and broken clients on every route, and those that leave a stream: no 5xx, no hanging request, no page lost."""

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from jinfercept.serve.http.access_log import DETAILS, AccessLog
from jinfercept.serve.http.event_stream import EventStream
from jinfercept.serve.protocols.encoding import encode_event
from jinfercept.serve.serve import HttpProtocol, reserve_files
from tests.support.attacks import ATTACKS, Attacker
from tests.support.engine_state import engine_state
from tests.support.live_server import MODEL, Running, running, until
from tests.support.scripted_model import Scripted

CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go on."}]})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "Go on."})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "Go on."})
MESSAGES: tuple[str, dict[str, Any]] = ("/v1/messages", CHAT[1] | {"max_tokens": 1900})
GENERATING = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT, RESPONSES, MESSAGES])
POSTED = (
    CHAT[0],
    TEXT[0],
    RESPONSES[0],
    MESSAGES[0],
    f"{MESSAGES[0]}/count_tokens",
    "/tokenize",
    "/detokenize",
)
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

BROKEN = (
    b"{",
    b"\xff\xfe\x00",
    b'"\xc3\x28"',
    b"[" * 50_000,
    b'{"a":' * 2000 + b"{}" + b"}" * 2000,
    b'{"model": Infinity}',
    b'{"prompt": "\\udfff", "messages": "\\udfff", "input": "\\udfff"}',
    b'{"prompt": 1e400}',
    b'{"metadata": {"a": [-1e400]}}',
    b'{"metadata": {"a": 1' + b"0" * 400 + b".5}}",
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"null",
    b"[]",
    b"3",
    b"",
    b"\x00" * 100,
)
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"GET /v1/models/\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n" * 100,
)


@pytest.fixture(scope="module")
def impatient(shared_server: Running) -> Iterator[Running]:
    """A second server on the same model, with short timeouts."""
    limits = {
        "max_body_size": 100_000,
        "header_timeout": 0.3,
        "body_timeout": 0.3,
        "timeout_keep_alive": 1,
        "write_timeout": 0.3,
    }
    with running(shared_server.llm, **limits) as server:
        yield server
        server.wait_idle()


def connect(server: Running, **options: int) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def posting(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def rest_of(connection: socket.socket) -> bytes:
    """The remaining bytes, until the server ends the connection."""
    got = b""
    try:
        while piece := connection.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def no_connections(server: Running) -> bool:
    return not server.server.server_state.connections


@pytest.mark.parametrize("path", POSTED)
def test_every_endpoint_refuses_what_is_no_json(served: Running, path: str) -> None:
    for body in BROKEN:
        answer = served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body[:40]
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTED)
def test_every_endpoint_refuses_what_is_too_large(impatient: Running, path: str) -> None:
    for content in (b"[" + b"1," * 60_000, iter([b"[", *[b"1," * 1000] * 60])):  # and without its length
        assert impatient.http.post(path, content=content).status_code == 413


def test_bytes_that_are_no_http_end_their_connection_only(impatient: Running) -> None:
    for sent in GARBAGE:
        with connect(impatient) as connection:
            connection.sendall(sent)
            assert b" 50" not in rest_of(connection)[:15], sent
    until(lambda: no_connections(impatient))
    assert impatient.http.get("/health").status_code == 200


def test_many_that_dawdle_hold_nobody_up(served: Running, impatient: Running, scripted: Scripted) -> None:
    """Heads and bodies without their ends: a server that waits for them serves others, and an impatient one ends them."""
    scripted.follow()
    whole = posting(TEXT[0], TEXT[1] | {"max_tokens": 2})
    for server in (served, impatient):
        slow = [connect(server) for _ in range(20)]
        for number, connection in enumerate(slow):
            connection.sendall(whole[: 20 if number % 2 else len(whole) - 3])
        if server is served:
            assert server.http.post(TEXT[0], json=TEXT[1] | {"max_tokens": 2}).status_code == 200
            assert len(server.server.server_state.connections) > 20
        for number, connection in enumerate(slow):
            with connection:
                assert server is served or (b"408" in rest_of(connection)) == (number % 2 == 0)


@pytest.mark.usefixtures("gate")
@GENERATING
def test_clients_that_leave_at_any_moment_leave_no_page_behind(
    served: Running, scripted: Scripted, path: str, body: dict[str, Any]
) -> None:
    scripted.follow()
    rng = Random(path)
    for number in range(8):
        with connect(served) as connection:
            connection.sendall(posting(path, ENDLESS | body | {"stream": number % 4 > 0}))
            for _ in range(rng.randrange(4) if number % 4 else 0):
                connection.recv(200)
            time.sleep(rng.random() / 20)
            if number % 2:  # at once, without a farewell
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    until(lambda: not engine_state(served.llm).has_work)
    served.wait_idle()
    until(lambda: not served.service._streams)  # pyright: ignore[reportPrivateUsage]


def test_a_client_that_does_not_read_is_cut_off(impatient: Running, scripted: Scripted) -> None:
    scripted.follow()
    path, body = CHAT
    much = {"stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "temperature": 1, "n": 2}
    with connect(impatient, SO_RCVBUF=2048) as connection:
        connection.sendall(posting(path, body | much))
        until(lambda: engine_state(impatient.llm).has_work)
        until(lambda: no_connections(impatient))
        assert b"[DONE]" not in rest_of(connection)
    impatient.wait_idle()


def test_only_one_request_is_served_behind_an_unread_answer(
    impatient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    was = AccessLog.__call__
    monkeypatch.setattr(
        AccessLog, "__call__", lambda self, scope, *more: served.append(scope["type"]) or was(self, scope, *more)
    )
    with connect(impatient, SO_RCVBUF=2048) as connection:
        connection.sendall((b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n") * 80)
        until(lambda: bool(served))
        until(lambda: no_connections(impatient))
    assert 0 < len(served) < 80


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_attack_gets_an_answer(served: Running, scripted: Scripted, kind: str) -> None:
    scripted.follow()
    where = urlsplit(served.url)
    attacker = Attacker(str(where.hostname), where.port or 0, "any", MODEL, 20.0, Random(kind))
    answer = asyncio.run(ATTACKS[kind](attacker))
    assert answer.left or 200 <= answer.status < 500, answer


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"], ids=["kept alive", "closed"])
def test_no_answer_is_so_small_that_a_client_may_leave_it_unread(
    impatient: Running, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    """However many bytes stay in the server: from none, which the kernel takes, to more than one buffer of the kernel's."""
    accepted: list[asyncio.Transport] = []

    def small(transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        accepted.append(transport)

    was = HttpProtocol.connection_made
    monkeypatch.setattr(
        HttpProtocol, "connection_made", lambda self, transport: small(transport) or was(self, transport)
    )
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    there = [connect(impatient, SO_RCVBUF=2048) for _ in range(30)]
    for number, connection in enumerate(there):
        with suppress(BrokenPipeError, ConnectionResetError):  # its time is over already
            connection.sendall((request + b"\r\n") * (3 * number) + request + last + b"\r\n")
    until(lambda: len(accepted) == len(there))
    until(lambda: no_connections(impatient))
    for connection in there:
        connection.close()


def test_a_thousand_buffered_requests_are_served_one_by_one(served: Running) -> None:
    with connect(served) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        connection.settimeout(60)
        got = b""
        while got.count(b"HTTP/1.1 200 OK\r\n") < 1000:
            piece = connection.recv(65536)
            assert piece
            got += piece


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


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_connections_beyond_the_limit_are_refused_and_the_others_served(scripted: Scripted) -> None:
    with running(scripted.llm, max_connections=3) as server:
        there = [connect(server) for _ in range(3)]
        until(lambda: len(server.server.server_state.connections) == 3)
        for _ in range(20):
            with connect(server) as refused:
                head, _, body = refused.recv(4096).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert head.endswith(b"content-length: %d" % len(body))
                assert refused.recv(4096) == b""
        for connection in there:
            connection.sendall(HEALTH)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        there.pop().close()
        until(lambda: len(server.server.server_state.connections) == 2)
        assert server.http.get("/health").status_code == 200
        for connection in there:
            connection.close()


def test_a_server_may_open_as_many_files_as_its_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert reserve_files(2048) == 2048
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2048
        assert reserve_files(10**9) < hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
