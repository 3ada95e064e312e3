"""`/v1/responses` over a WebSocket, with OpenAI's client."""

import json
import logging
import signal
import socket as sockets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from openai import OpenAI
from openai.resources.responses.responses import ResponsesConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.support.engine_state import engine_state
from tests.support.gate import Gate
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import ASKED, CALL, CHAT_PRICE, PRICE, QUESTION, says
from tests.support.scripted_model import Scripted

LONG: Any = {"input": "Go on.", "max_output_tokens": 1900}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def socket(served: Running) -> Iterator[ResponsesConnection]:
    with served.client.responses.connect() as connection:
        yield connection


def create(connection: ResponsesConnection, given: Any = QUESTION, **fields: Any) -> None:
    connection.send({"type": "response.create", "model": MODEL, "input": given, "temperature": 0} | fields)  # pyright: ignore


def events(connection: ResponsesConnection) -> Iterator[Any]:
    """The events up to the end of a response."""
    while True:
        yield (event := connection.recv())
        if event.type in ENDS:
            return


def respond(connection: ResponsesConnection, given: Any = QUESTION, **fields: Any) -> Any:
    """The response to an input, or the error."""
    create(connection, given, **fields)
    *_, last = events(connection)
    return last if last.type == "error" else last.response


@contextmanager
def raw(server: Running, **headers: str) -> Iterator[ClientConnection]:
    with connect(f"ws{server.url[4:]}/v1/responses", additional_headers=headers, compression=None) as connection:
        yield connection


def refused(server: Running, **headers: str) -> tuple[int, Any]:
    """Status and code of the answer to a handshake."""
    with pytest.raises(InvalidStatus) as error, raw(server, **headers):
        pass
    answer = error.value.response
    return answer.status_code, json.loads(answer.body or b"{}")["error"]["code"]


def error_of(connection: ClientConnection, frame: str | bytes) -> tuple[int, Any, Any]:
    connection.send(frame)
    event = json.loads(connection.recv(60))
    assert event["type"] == "error"
    return event["status"], event["error"]["code"], event["error"]["param"]


def test_a_turn_has_the_events_of_a_stream_over_http(
    socket: ResponsesConnection, served: Running, scripted: Scripted
) -> None:
    says(scripted, "It costs 23." + END)
    create(socket)
    over_socket = list(events(socket))
    body: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "stream": True}
    over_http = list(served.client.responses.create(**body))

    def shape(event: Any) -> Any:
        return event.type, event.sequence_number, getattr(event, "delta", None)

    assert list(map(shape, over_socket)) == list(map(shape, over_http))
    assert over_socket[-1].response.output_text == "It costs 23."
    assert served.client.responses.retrieve(over_socket[-1].response.id).output_text == "It costs 23."


def test_turns_with_tools_go_on_without_being_stored(
    socket: ResponsesConnection, served: Running, scripted: Scripted
) -> None:
    says(scripted, CALL + END, tools=[CHAT_PRICE])
    fields: Any = {"tools": [PRICE], "store": False}
    first = respond(socket, **fields)
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "23"}
    function = {"name": "price", "arguments": call.arguments}
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.call_id, "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "name": "price", "content": "23"},
    ]
    says(scripted, "It costs 23." + END, messages, [CHAT_PRICE])
    second = respond(socket, [result], previous_response_id=first.id, **fields)
    assert second.output_text == "It costs 23."
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16
    assert served.http.get(f"/v1/responses/{second.id}").status_code == 404
    with served.client.responses.connect() as other:
        assert (
            respond(other, [result], previous_response_id=second.id, **fields).error.code
            == "previous_response_not_found"
        )
    assert respond(socket, "And?", previous_response_id=second.id).error.param == "store"
    for each in (first, second):
        more = respond(socket, previous_response_id=each.id, store=False, max_output_tokens=1)
        assert more.status == "incomplete"
    socket.close()
    until(lambda: not served.service.state.last)


def test_a_response_that_is_not_generated_is_continued(socket: ResponsesConnection, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    warm = respond(socket, generate=False, store=False)
    assert (warm.status, warm.output) == ("completed", [])
    answer = respond(socket, [], previous_response_id=warm.id, store=False)
    assert answer.output_text == "It costs 23."
    assert answer.usage.input_tokens_details.cached_tokens >= warm.usage.input_tokens - 16


@pytest.mark.usefixtures("gate")
def test_a_client_that_closes_cancels_its_requests(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    with served.client.responses.connect() as socket:
        for _ in range(2):
            create(socket, **LONG)
        until(lambda: engine_state(served.llm).num_unfinished == 1)
    until(lambda: not engine_state(served.llm).has_work)


def test_errors_are_events_and_the_connection_goes_on(
    socket: ResponsesConnection, served: Running, scripted: Scripted
) -> None:
    wrong = respond(socket, temperature=-1)
    assert (wrong.status, wrong.error.param) == (400, "temperature")
    for name, value in (("background", True), ("stream_id", "a")):
        assert respond(socket, **{name: value}).error.param == name
    assert respond(socket, model="none").status == 404
    missing = respond(socket, previous_response_id="resp_0", store=False)
    assert (missing.status, missing.error.code) == (404, "previous_response_not_found")
    large = respond(socket, "x" * 100_000)
    assert (large.status, large.error.param) == (400, "input")
    with raw(served) as connection:
        for frame, wrong in (
            (b"{}", (400, "invalid_json", None)),
            ("{", (400, "invalid_json", None)),
            ("[" * 50_000, (400, "invalid_json", None)),
            ("[]", (400, None, "type")),
            ("{}", (400, None, "type")),
            ('{"type": "response.steer"}', (400, None, "type")),
            ('{"type": "response.create"}', (400, None, "input")),
        ):
            assert error_of(connection, frame) == wrong, frame
        connection.send('{"response_id": "resp_0"}')
        assert json.loads(connection.recv(60))["error"]["message"] == "a frame is an object, with type: response.create"
        connection.send('{"type": "response.create", "input": 5}')
        wrong = json.loads(connection.recv(60))["error"]["message"]
        assert wrong == "input: Input should be a text or a list of items (got 5)"
        connection.send('{"type": "response.processed", "response_id": "resp_0"}')
    says(scripted, "It costs 23." + END)
    assert respond(socket).output_text == "It costs 23."


@pytest.mark.usefixtures("gate")
def test_a_flood_of_requests_is_refused_while_one_runs(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    with served.client.responses.connect() as socket:
        create(socket, **LONG)
        until(lambda: engine_state(served.llm).num_unfinished == 1)
        create(socket, "x" * 2**21)  # waits behind the long one
        assert respond(socket, "x" * 2**21).error.code == "queue_full"
        for _ in range(14):
            create(socket)
        for _ in range(2):
            refusal = refusal_of(socket)
            assert (refusal.status, refusal.error.code, refusal.error.headers) == (
                429,
                "queue_full",
                {"retry-after": "1"},
            )
    until(lambda: not engine_state(served.llm).has_work)


@pytest.mark.usefixtures("gate")
def test_requests_that_run_or_wait_are_not_kept_as_objects(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    with served.client.responses.connect() as socket:
        before = sys.getallocatedblocks()
        create(socket, **LONG, unknown=60_000 * [{}])
        until(lambda: engine_state(served.llm).num_unfinished == 1)
        create(socket, 60_000 * [{}])  # waits behind the long one
        assert refusal_of(socket, background=True).error.param == "background"
        until(lambda: sys.getallocatedblocks() - before < 30_000)
    until(lambda: not engine_state(served.llm).has_work)


@pytest.mark.parametrize(
    "given",
    [
        {"tools": "here"},
        {"input": [{"type": "additional_tools", "tools": "here"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}", "jinfercept": {"unknown": "here"}}]},
        {"input": [{"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "unknown": "here"}}]},
    ],
)
def test_what_is_kept_of_a_response_has_no_fields_of_no_use(served: Running, scripted: Scripted, given: Any) -> None:
    says(scripted, "It costs 23." + END)
    large = [{"type": "web_search", "unknown": 60_000 * [{}]}]
    text = json.dumps(
        {"type": "response.create", "model": MODEL, "store": False, "input": "?", "temperature": 0} | given
    )
    frame = text.replace('"here"', json.dumps(large))
    with raw(served) as socket:
        before = sys.getallocatedblocks()
        socket.send(frame)
        until(lambda: json.loads(socket.recv(60))["type"] in ENDS)
        until(lambda: sys.getallocatedblocks() - before < 30_000)


def refusal_of(connection: Any, **fields: Any) -> Any:
    """The error with which a request is refused while another one runs."""
    create(connection, **fields)
    while (event := connection.recv()).type != "error":
        pass
    return event


def test_keys_are_checked_at_the_handshake_and_have_limits(
    shared_server: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    says(scripted, "It costs 23." + END)
    options: Any = {"api_key": ("one", "two"), "max_websockets": 1}
    with running(shared_server.llm, **options) as server:
        assert refused(server) == (401, "invalid_api_key")
        assert refused(server, authorization="Bearer three") == (401, "invalid_api_key")
        with server.client.responses.connect() as socket, raw(server, authorization="Bearer two") as other:
            unstored = respond(socket, store=False)
            assert unstored.output_text == "It costs 23."
            assert refused(server, authorization="Bearer one") == (429, "too_many_websockets")
            for name in (unstored.id, respond(socket).id):
                frame = {"type": "response.create", "input": "And?", "previous_response_id": name, "store": False}
                assert error_of(other, json.dumps(frame)) == (
                    404,
                    "previous_response_not_found",
                    "previous_response_id",
                )
        until(lambda: not server.server.server_state.connections)
        with OpenAI(base_url=f"{server.url}/v1", api_key="one").responses.connect() as socket:
            assert respond(socket).output_text == "It costs 23."
    assert not errors_in(caplog)


def test_a_web_page_of_another_site_opens_no_connection(served: Running) -> None:
    assert refused(served, origin="http://evil.example") == (403, "origin_not_allowed")
    with raw(served, origin=served.url):
        pass
    assert served.http.get("/v1/responses").status_code == 405


HANDSHAKE = (
    "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
PING, EMPTY, MORE, BYE = b"\x89\xfd0000" + 125 * b"0", b"\x01\x800000", b"\x00\x800000", b"\x88\x800000"
BINARY, QUIET_PING = b"\x82\x800000", b"\x89\x800000"
LARGE = b"\x81\xff" + (2**22 + 1).to_bytes(8) + bytes(4)

FRAME = json.dumps({"type": "response.create", "input": "Go on.", "ignore_eos": True}).encode()
CREATE = b"\x81\xfe" + len(FRAME).to_bytes(2) + bytes(4) + FRAME


def opened(server: Running) -> sockets.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = sockets.socket()
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def exchanged(server: Running, sent: bytes) -> bytes:
    """What a server answers up to the end of the connection."""
    with opened(server) as connection:
        connection.sendall(sent)
        got = b""
        while piece := connection.recv(65536):
            got += piece
        return got


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("Version: 13", "Version: 8", b"400|426"),
        ("Key: A", "Key: ", b"400"),
        ("HTTP/1.1", "HTTP/1.0", b"405"),
        ("GET", "POST", b"411|405|400|415|422"),
        ("Upgrade: websocket\r\n", "Upgrade: websocket\r\nContent-Length: 0\r\n", b"405"),
        ("Upgrade: websocket\r\n", "Upgrade: h2c\r\n", b"405"),
        ("/v1/responses", "/v1/models", b"200"),
        ("/v1/responses", f"/v1/responses?{9000 * 'a'}", b"414"),
        ("Upgrade: websocket\r\n", f"Upgrade: websocket\r\nX: {9000 * 'a'}\r\n", b"431"),
        ("Upgrade: websocket\r\n", f"Upgrade: websocket\r\n{200 * 'X: a\r\n'}", b"431"),
    ],
)
def test_what_is_no_handshake_is_answered_over_http(served: Running, old: str, new: str, status: bytes) -> None:
    closing = HANDSHAKE.replace("Connection: Upgrade", "Connection: Upgrade, close").replace(old, new)
    assert exchanged(served, closing.encode()).split(b" ")[1] in status.split(b"|")


def test_only_the_first_request_of_a_connection_opens_one(served: Running) -> None:
    first = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with opened(served) as connection:
        connection.sendall(first.encode())
        until(lambda: connection.recv(65536).endswith(b"}"))
        connection.sendall(HANDSHAKE.replace("Upgrade\r\n", "Upgrade, close\r\n", 1).encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")


def test_frames_of_no_use_cost_little(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    for sent, code in (
        (EMPTY + 2000 * MORE, 1008),
        (2000 * BINARY, 1008),
        (2000 * QUIET_PING, 1008),
        (b"\x81\x8400000000"[:6] + b"\xff000", 1007),
        (LARGE, 1009),
        (BYE, 1005),
    ):
        with opened(served) as connection:
            connection.sendall(HANDSHAKE.encode() + BYE)  # frames before the server's answer are dropped
            until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
            connection.sendall(sent)
            frame = connection.recv(4096).lstrip(b"\x8a\0")  # pongs
            assert frame[:1] == b"\x88"
            assert int.from_bytes(frame[2:4]) == (0 if code == 1005 else code)
    until(lambda: not len(served.service.sockets))
    assert not errors_in(caplog)


def test_a_message_has_so_many_frames_however_slowly_they_come(served: Running) -> None:
    with opened(served) as connection:
        connection.sendall(HANDSHAKE.encode())
        until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
        connection.sendall(EMPTY)
        for _ in range(5):
            connection.sendall(200 * MORE + QUIET_PING)
            assert connection.recv(4096) == b"\x8a\x00"
        connection.sendall(200 * MORE)
        assert connection.recv(4096)[2:4] == (1009).to_bytes(2)


def test_frames_of_a_client_that_has_gone_are_not_answered(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    with opened(served) as connection:
        connection.sendall(HANDSHAKE.encode())
        until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
        connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        connection.sendall(250 * BINARY)
        assert connection.recv(1) == b"\x81"
    until(lambda: not len(served.service.sockets))
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("sent", [EMPTY, b"\x81\xff" + (2**20).to_bytes(8) + bytes(2**10)])
def test_a_message_without_an_end_ends_the_connection(scripted: Scripted, sent: bytes) -> None:
    with running(scripted.llm, body_timeout=0.2) as server, opened(server) as connection:
        connection.sendall(HANDSHAKE.encode())
        until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
        connection.sendall(sent)
        with suppress(ConnectionResetError):
            assert not connection.recv(4096)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("sent", [b"", 2000 * PING])
def test_a_client_that_does_not_read_is_cut_off(scripted: Scripted, sent: bytes) -> None:
    scripted.follow()
    with running(scripted.llm, send_buffer=2048, write_timeout=0.2) as server, opened(server) as connection:
        connection.sendall(HANDSHAKE.encode())
        until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
        connection.sendall(CREATE + sent)
        until(lambda: not server.server.server_state.connections)
        until(lambda: not engine_state(scripted.llm).has_work)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_that_says_goodbye_and_does_not_read_breaks_no_shutdown(scripted: Scripted) -> None:
    scripted.follow()
    with running(scripted.llm, send_buffer=2048) as server, opened(server) as connection:
        connection.sendall(HANDSHAKE.encode())
        until(lambda: connection.recv(4096).endswith(b"\r\n\r\n"))
        connection.sendall(CREATE)
        until(lambda: engine_state(scripted.llm).num_unfinished == 1)
        connection.sendall(BYE)
        until(lambda: not engine_state(scripted.llm).has_work)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.server.should_exit)


def test_a_drain_ends_a_connection_behind_its_response(scripted: Scripted, gate: Gate) -> None:
    scripted.follow()
    ends: list[tuple[str, Any]] = []
    with (
        running(scripted.llm, drain_timeout=60.0) as server,
        raw(server) as idle,
        server.client.responses.connect() as socket,
    ):
        create(socket, "Go on.", max_output_tokens=300)
        until(lambda: engine_state(server.llm).num_unfinished == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        assert close_code(idle) == 1012
        create(socket)
        gate.open()
        with pytest.raises(ConnectionClosed) as closed:
            ends.extend((event.type, getattr(event, "status", None)) for event in socket if event.type in ENDS)
    assert code_of(closed.value) == 1012
    assert sorted(ends) == [("error", 503), ("response.incomplete", None)]


def test_a_response_that_the_end_of_a_drain_aborts_has_a_last_event(scripted: Scripted, gate: Gate) -> None:
    scripted.follow()
    ends: list[Any] = []
    with running(scripted.llm, drain_timeout=0.0) as server, server.client.responses.connect() as socket:
        create(socket, "Go on.", max_output_tokens=300)
        until(lambda: engine_state(server.llm).num_unfinished == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.service.draining)
        gate.open()
        with pytest.raises(ConnectionClosed) as closed:
            ends.extend(event for event in socket if event.type in ENDS)
    assert code_of(closed.value) == 1012
    [end] = ends
    assert (end.type, end.response.error.code) == ("response.failed", "server_error")


def code_of(closed: ConnectionClosed) -> int | None:
    return closed.rcvd.code if closed.rcvd is not None else None


def close_code(connection: ClientConnection) -> int | None:
    """The code with which the server closes a connection."""
    try:
        while True:
            connection.recv(60)
    except ConnectionClosed as closed:
        return code_of(closed)
