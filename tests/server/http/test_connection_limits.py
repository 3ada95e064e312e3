"""The limit on the connections of a server, and the answers beyond it."""

import resource
import socket

from jinfercept.server.serve import reserve_files
from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(server: Running) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


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
