"""Limits on the connections of a server, in total and per address, and the answers beyond them."""

import resource
import socket
import subprocess
import sys

import pytest

from jinfercept.errors import ConfigError
from jinfercept.server.http.connection_limits import BACKLOG, MOST_CONNECTIONS, ConnectionLimits, reserve_files
from jinfercept.server.options import ServerOptions
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
                assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
                assert refused.recv(4096) == b""
        for connection in there:
            connection.sendall(HEALTH)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        there.pop().close()
        until(lambda: len(server.server.server_state.connections) == 2)
        assert server.http.get("/health").status_code == 200
        for connection in there:
            connection.close()


def test_a_client_from_elsewhere_is_counted_by_its_address(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfercept.server.http.http_protocol.get_remote_addr", lambda transport: ("203.0.113.7", 1))
    with running(scripted.llm, max_connections_per_address=1) as server:
        for _ in range(2):
            with connect(server) as first, connect(server) as second:
                assert second.recv(4096).startswith(b"HTTP/1.1 503 ")
                first.sendall(HEALTH)
                assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
            until(lambda: not server.server.server_state.connections)


def test_one_address_has_a_limit_and_loopback_has_none() -> None:
    limits = ConnectionLimits(100, 2)
    for address in ("203.0.113.7", "2001:db8::1", "::ffff:198.51.100.1", "10.0.0.1"):
        assert [limits.admit(address) for _ in range(3)] == [True, True, False]
    assert not limits.admit("2001:db8::ffff:1")  # of the same /64
    assert not limits.admit("198.51.100.1")  # the same address
    assert limits.admit("2001:db8:0:1::1")
    limits.release("203.0.113.7")
    assert [limits.admit("203.0.113.7") for _ in range(2)] == [True, False]
    for near in ("127.0.0.1", "::1", "::ffff:127.0.0.1", None):
        assert all(limits.admit(near) for _ in range(10))


def test_all_clients_together_have_a_limit() -> None:
    limits = ConnectionLimits(3, 0)
    addresses = ("203.0.113.7", None, "203.0.113.7", "127.0.0.1")
    assert [limits.admit(address) for address in addresses] == [True, True, True, False]
    limits.release("203.0.113.7")
    assert limits.admit(None)


def test_a_server_may_open_as_many_files_as_its_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert reserve_files(ServerOptions().max_connections) == (MOST_CONNECTIONS, BACKLOG)
        for most in (None, 1):
            reserve_files(most)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > MOST_CONNECTIONS
        with pytest.raises(ConfigError, match="--max-connections 1000000000"):
            reserve_files(10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limit", [256, 1024, 3000])
def test_a_server_takes_the_connections_that_the_hard_limit_has_files_for(limit: int) -> None:
    program = f"""if True:
        import resource
        from jinfercept.errors import ConfigError
        from jinfercept.server.options import ServerOptions
        from jinfercept.server.serve import listen, reserve_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, {limit}))
        listen(ServerOptions(port=0))
        most, backlog = reserve_files(None)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == {limit} >= most + backlog + 50, (most, backlog)
        assert most >= {limit} // 3, most
        reserve_files(most)
        try:
            listen(ServerOptions(max_connections=2048))
        except ConfigError as error:
            assert "the hard limit of open files is {limit}" in str(error), error
            reserve_files(int(str(error).split("of at most ")[1].split(",")[0]))
        else:
            assert {limit} == 3000
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
