"""Every request gets one answer, for any body, and for any split of its bytes over writes."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import h11
import pytest

from jinfercept.serve.serve import MAX_HEAD_BYTES
from tests.support.engine_state import engine_state
from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted

TOKENIZE = json.dumps({"prompt": "Hi"}).encode()
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
KEY = b"Authorization: Bearer one\r\n"
JSON = b"Content-Type: application/json\r\n"
_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")
HEADERS = (
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: TLS/1.0\r\n",
    b"X-Empty:\r\n",
)


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    status: int
    body: bytes = b""

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens in an answer of `/tokenize`."""
        return len(json.loads(self.body)["tokens"]) if b'"tokens"' in self.body else None


@pytest.fixture(scope="module")
def keyed(shared_server: Running) -> Iterator[Running]:
    """A second server on the same model, with a key."""
    with running(
        shared_server.llm,
        api_key=("one",),
        max_body_size=200_000,
        header_timeout=2.0,
        body_timeout=2.0,
        timeout_keep_alive=1,
    ) as server:
        yield server
        server.wait_idle()


def exchange(server: Running, *writes: bytes, pause_s: float = 0.0) -> list[Answer]:
    """The answers on one connection to which `writes` are sent and which the client then leaves idle until it is closed."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BrokenPipeError, ConnectionResetError):
            for data in writes:
                connection.sendall(data)
                time.sleep(pause_s)
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                got += piece
    return answers(got)


def answers(data: bytes) -> list[Answer]:
    """Splits what a connection has received into answers; none of it may be anything else."""
    received = []
    while data:
        head = _HEAD.match(data)
        assert head, data[:80]
        headers = dict(line.lower().split(b": ", 1) for line in head[2].split(b"\r\n") if line)
        size = int(headers.get(b"content-length", len(data) if headers.get(b"connection") == b"close" else 0))
        body = data[head.end() : head.end() + size]
        received.append(Answer(int(head[1]), body))
        data = data[head.end() + len(body) :]
    return received


def post(body: bytes, *headers: bytes, path: bytes = b"/tokenize") -> bytes:
    """The bytes of a request."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + b"".join(headers)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMUGGLING = b"{" + b"\r\nupgrade:" * (len(HIDDEN) // 2) + HIDDEN
"""A body that ends in a request, at the place where it would be cut off if every `upgrade:` grew by two bytes."""


def test_a_body_with_upgrade_lines_is_one_request_without_a_key(keyed: Running) -> None:
    head, end, body = post(SMUGGLING, path=b"/v1/completions").partition(b"\r\n\r\n")
    assert [answer.status for answer in exchange(keyed, head + end, body, pause_s=0.05)] == [401]


def test_a_body_in_tiny_chunks_does_not_hold_the_event_loop(keyed: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" + KEY + JSON + b"\r\n"
    host, _, port = keyed.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + b"1\r\n \r\n" * 30_000)  # a body has 2 s, on a busy machine, too
        assert keyed.http.get("/health").status_code == 200
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(TOKENIZE), TOKENIZE))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("rest", [b"a:\n", b"a:\r\n", b" c\r\n", b"bytes"])
def test_of_a_head_that_is_too_large_little_is_parsed(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    parsed: list[int] = []
    was = h11.Request.__init__
    monkeypatch.setattr(
        h11.Request, "__init__", lambda self, **kwargs: parsed.append(len(kwargs["headers"])) or was(self, **kwargs)
    )
    large = GET + b"a: b" + b"\r\n" * (rest != b"bytes") + rest * (8 * MAX_HEAD_BYTES // len(rest)) + b"\r\n\r\n"
    for before, status in ((b"", []), (GET + b"\r\n", [200]), (post(TOKENIZE, KEY, JSON), [200])):
        assert [answer.status for answer in exchange(keyed, before + large + LAST)] in ([*status, 400], status)
    assert max(parsed, default=0) <= 5


def test_a_head_as_large_as_allowed_is_served_wherever_it_is(keyed: Running) -> None:
    end = b"Connection: close\r\n\r\n"
    last = GET + b"a: " + b"b" * (MAX_HEAD_BYTES - len(GET + b"a: \r\n" + end)) + b"\r\n" + end
    for writes in ([last], [last[:-1], last[-1:]], [post(TOKENIZE, KEY, JSON) + GET + b"\r\n" + last]):
        assert {answer.status for answer in exchange(keyed, *writes, pause_s=0.02)} == {200}


def test_after_an_answer_before_the_end_of_the_body_its_rest_is_no_request(keyed: Running) -> None:
    body = HIDDEN * 5000
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for status, request in (
        (401, post(body)),
        (404, post(body, KEY, path=b"/nothing")),
        (405, post(body, KEY, path=b"/version")),
        (413, post(body, KEY, JSON)),
        (200, get),
    ):
        assert [answer.status for answer in exchange(keyed, request + LAST)] == [status, 200]


def test_a_client_that_writes_a_large_body_before_it_reads_gets_the_answer(keyed: Running) -> None:
    assert [answer.status for answer in exchange(keyed, post(b"x" * 40_000_000) + LAST)] == [401, 200]


def send_on(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 2000)
        time.sleep(0.01)


def test_a_client_that_goes_on_sending_after_the_answer_is_cut_off(keyed: Running) -> None:
    host, _, port = keyed.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(post(b"").replace(b"Content-Length: 0", b"Content-Length: 999999999"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_on(connection)
    until(lambda: not keyed.server.server_state.connections)


@pytest.mark.usefixtures("gate")
def test_a_client_that_leaves_after_an_upgrade_is_noticed(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    body = json.dumps({"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True}).encode()
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(post(body, JSON, HEADERS[0], path=b"/v1/completions"))
        until(lambda: engine_state(served.llm).has_work)
    until(lambda: not engine_state(served.llm).has_work)


def test_a_trailer_has_as_many_bytes_as_a_head(keyed: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" + KEY + JSON + b"\r\n"
    body = b"%x\r\n%s\r\n0\r\n" % (len(TOKENIZE), TOKENIZE)
    assert [answer.status for answer in exchange(keyed, head + body + b"a:\r\n" * 100 + b"\r\n" + LAST)] == [200, 200]
    much = body + b"a:\r\n" * 50_000 + b"\r\n" + LAST
    assert [answer.status for answer in exchange(keyed, head + much)] in ([400], [])


def test_a_client_that_waits_for_continue_is_refused_instead(keyed: Running) -> None:
    expect = b"Expect: 100-continue\r\n"
    head = post(TOKENIZE, JSON, expect).partition(TOKENIZE)[0]
    assert [answer.status for answer in exchange(keyed, head)] == [401]
    large = post(b"x" * 200_001, KEY, JSON, expect).partition(b"xx")[0]
    assert [answer.status for answer in exchange(keyed, large)] == [413]
    allowed = post(TOKENIZE, KEY, JSON, expect, b"Connection: close\r\n").partition(TOKENIZE)[0]
    host, _, port = keyed.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(allowed)
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(TOKENIZE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


PIECES = (
    b"\r\n\r\n",
    b"\r\n",
    b"\r\nupgrade: h2c\r\n",
    b"0\r\n\r\n",
    b"5\r\n",
    HIDDEN,
    LAST,
    post(TOKENIZE, KEY, JSON),
    b"\0\xff{",
)


def random_body(rng: Random) -> tuple[bytes, int | None]:
    """A body, and the length of its prompt if it is a request to tokenise."""
    pieces = rng.choices(PIECES, k=rng.randrange(6))
    if rng.random() < 0.5:
        return b"{" + b"".join(pieces), None
    length = rng.randrange(1, 50)
    space = b"".join(piece for piece in pieces if not piece.strip())
    return space + b'{"prompt":' + space + b'"' + b"x" * length + b'"' + space + b"}" + space, length


def random_request(rng: Random) -> tuple[bytes, tuple[int, int | None]]:
    """A request, and what its answer has to be: status, number of tokens."""
    headers = rng.choice(HEADERS) if rng.random() < 0.5 else b""
    if rng.random() < 0.2:
        return b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n", (200, None)
    body, length = random_body(rng)
    path, method, status = rng.choice(
        [
            *[(b"/tokenize", b"POST", 400 if length is None else 200)] * 8,
            (b"/version", b"GET", 200),
            (b"/nothing", b"POST", 404),
            (b"/tokenize", b"PUT", 405),
        ]
    )
    if path == b"/tokenize" and method == b"POST" and rng.random() < 0.15:
        status = 401
    else:
        headers += KEY
    head = method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + JSON
    if rng.random() < 0.5:
        whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        cuts = sorted(rng.sample(range(1, len(body)), min(rng.randrange(4), len(body) - 1)))
        chunks = [body[start:end] for start, end in pairwise((0, *cuts, len(body)))]
        whole = head + b"Transfer-Encoding: chunked\r\n\r\n"
        whole += b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return whole, (status, length if (status, path) == (200, b"/tokenize") else None)


def test_every_request_has_its_own_answer_however_its_bytes_are_split(keyed: Running) -> None:
    for seed in range(150):
        rng = Random(seed)
        requests = [*(random_request(rng) for _ in range(rng.randrange(1, 6))), (LAST, (200, None))]
        sent = b"".join(request for request, _ in requests)
        expected = [answer for _, answer in requests]
        cuts = sorted(rng.sample(range(1, len(sent)), rng.randrange(8)))
        writes = [sent[start:end] for start, end in pairwise((0, *cuts, len(sent)))]
        got = exchange(keyed, *writes, pause_s=rng.choice((0, 0.001)))
        assert [(answer.status, answer.num_tokens) for answer in got] == expected, (seed, writes)
