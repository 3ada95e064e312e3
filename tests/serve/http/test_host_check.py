"""Requests that name another host than the server's, and those that a page of another site has a browser send."""

import socket

import pytest

from jinfercept.errors import ConfigError
from jinfercept.serve.http.allowed_hosts import AllowedHosts
from jinfercept.serve.options import ServerOptions
from tests.support.live_server import Running, running
from tests.support.served import CHAT, shape

HERE = (
    "localhost",
    "localhost:8000",
    "LocalHost.:8000",
    "page.localhost",
    "127.0.0.1",
    "127.0.0.1.:80",
    "10.1.2.3:8000",
    "[::1]:8000",
    "[FE80::1%25eth0]:80",
    "[fe80::1%eth0]",
)
ELSEWHERE = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evillocalhost",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example?.localhost",
    "[evil.example]",
    "[::1].evil.example",
    "::1",
    "localhost:80:80",
    "localhost:evil",
    "",
    " ",
    "é.localhost",
)


def test_named_hosts_are_allowed_with_any_port_in_any_case() -> None:
    hosts = AllowedHosts(("LLM.Example.org", "*.internal.example"))
    for allowed in ("llm.example.org", "LLM.EXAMPLE.ORG.:8000", "a.internal.example", "a.b.internal.example:1", *HERE):
        assert hosts.allows(allowed), allowed
    for refused in ("example.org", "a.llm.example.org", "internal.example", "evilinternal.example", *ELSEWHERE):
        assert not hosts.allows(refused), refused
    assert all(AllowedHosts(("*",)).allows(host) for host in (*HERE, *ELSEWHERE))


@pytest.mark.parametrize(
    "name", ["http://a.example", "a.example:80", "a.example/x", "a.*.example", "**", "", "a b", "é", "a,b"]
)
def test_a_name_that_is_no_host_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerOptions(allowed_hosts=(name,))


def test_hosts_are_checked_where_clients_need_no_key_or_a_flag_says_so() -> None:
    def allows(name: str, /, **options: object) -> bool:
        hosts = ServerOptions(**options).hosts()  # pyright: ignore[reportArgumentType]
        return hosts is None or hosts.allows(name)

    assert not allows("evil.example")
    assert not allows("evil.example", host="0.0.0.0")
    assert allows("box.lan", host="box.lan")
    assert allows("evil.example", api_key=("one",))
    assert allows("evil.example", operator_key=("one",))
    assert not allows("evil.example", api_key=("one",), allowed_hosts=("llm.example.org",))
    assert allows("llm.example.org", api_key=("one",), allowed_hosts=("llm.example.org",))
    assert allows("any name", uds="/run/llm.sock")
    for address in ("10.0.0.5", "::1", "[::1]"):
        ServerOptions(allowed_hosts=(address,))


EVIL = "evil.example"


def _status(server: Running, head: bytes) -> int:
    """Status of the answer to a head without its last line."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/openapi.json"),
        ("GET", "/health"),
        ("HEAD", "/ready"),
        ("GET", "/metrics"),
        ("GET", "/live"),
        ("GET", "/inbox"),
        ("GET", "/nothing"),
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/v1/conversations"),
        ("DELETE", "/v1/responses/resp_0"),
        ("OPTIONS", CHAT),
    ],
)
def test_a_page_of_another_host_reaches_no_path_of_a_server_without_keys(
    served: Running, method: str, path: str
) -> None:
    answer = served.http.request(method, path, headers={"host": f"{EVIL}:8000", "origin": f"http://{EVIL}:8000"})
    assert answer.status_code == 421
    assert "access-control-allow-origin" not in answer.headers
    if method != "HEAD":
        assert shape(answer) == (421, "host_not_allowed")
        assert "--allowed-hosts" in answer.text


def test_anthropic_clients_get_their_own_error(served: Running) -> None:
    answer = served.http.post("/v1/messages", json={}, headers={"host": EVIL})
    assert (answer.status_code, answer.json()["error"]["type"]) == (421, "invalid_request_error")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: LOCALHOST.:1\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost:\r\n", 421),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET /health HTTP/1.0\r\nHost: evil.example\r\n", 421),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Host: evil.example\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\n", 421),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nForwarded: host=localhost\r\n", 421),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\n", 421),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n", 404),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 404),
        (b"GET http://localhost@evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 404),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", 421),
    ],
)
def test_every_host_that_a_request_names_is_checked(served: Running, head: bytes, status: int) -> None:
    assert _status(served, head) == status


def test_with_keys_hosts_are_checked_if_some_are_named(served: Running) -> None:
    with running(served.llm, api_key=("one",), allowed_hosts=("llm.example",)) as server:
        for host, status in ((EVIL, 421), ("llm.example:80", 200), ("localhost", 200)):
            answer = server.http.get("/v1/models", headers={"host": host, "authorization": "Bearer one"})
            assert answer.status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Origin": "http://evil.example", "Content-Type": "application/x-www-form-urlencoded"}, 403),
        (
            {"Origin": "http://evil.example", "Content-Type": "application/json"},
            200,
        ),  # a browser asks before it sends this
        ({}, 200),
    ],
)
def test_a_page_of_another_site_can_send_nothing_of_which_no_browser_asks_before(
    served: Running, headers: dict[str, str], status: int
) -> None:
    reply = served.http.post("/v1/conversations", headers=headers)
    assert reply.status_code == status
    if status == 403:
        assert reply.json()["error"]["code"] == "origin_not_allowed"


def test_a_page_of_the_server_itself_may_post(served: Running) -> None:
    assert served.http.post("/v1/conversations", headers={"Origin": served.url}).status_code == 200
