"""HTTP endpoints as tools, against a server that is slow, returns large or failing answers, or redirects."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jinfercept.errors import ConfigError
from jinfercept.tools.calls import CallFailed
from jinfercept.tools.http_tool import CheckedTransport, Hosts, is_public
from tests.support.tool_runner import tool_runner, until


class Site(ThreadingHTTPServer):
    """A server that answers by path, and records requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self.moods = 0
        self.target = ""
        self.left = threading.Event()
        self.go = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Site  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = self.rfile.read(size).decode()
        self.server.asked.append((self.command, self.path, dict(self.headers.items()), body))
        match self.path.split("?")[0].strip("/").split("/"):
            case ["slow"]:
                try:
                    self._answer(200, "begun", length=1000)
                    while not self.server.go.wait(0.02):
                        self.wfile.write(b".")
                except OSError:
                    self.server.left.set()
            case ["huge"]:
                self._answer(200, "x" * 5000)
            case ["moody"]:
                self.server.moods += 1
                self._answer(503 if self.server.moods < 3 else 200, "at last")
            case ["moved", "to"]:
                self._answer(302, "", location=self.server.target)
            case ["moved", *rest]:
                port = self.server.server_address[1]
                host = {"abroad": "localhost", "file": ""}.get(rest[0], "127.0.0.1")
                target = f"http://{host}:{port}/echo" if host else "file:///etc/passwd"
                self._answer(307 if "keep" in rest else 302, "", location=target)
            case ["missing"]:
                self._answer(404, "no such thing")
            case ["json"]:
                self._answer(200, '{"hits": [{"text": "first"}, {"text": "second", "a/b": 3}]}')
            case _:
                self._answer(200, self.path)

    do_POST = do_GET

    def _answer(self, status: int, text: str, length: int | None = None, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("location", location)
        self.send_header("content-length", str(length or len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    thread = threading.Thread(target=lambda: server.serve_forever(0.01))
    thread.start()
    yield server
    server.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def table(site: Site, path: str, more: str = "", allow: str = '"127.0.0.1"') -> str:
    port = site.server_address[1]
    allowed = f"allow_hosts = [{allow}]\n" if allow else ""
    url = f'url = "http://127.0.0.1:{port}/{path}"\n'
    return f'[[tool]]\nkind = "http"\nname = "web"\ndescription = "asks"\n{url}{allowed}{more}\n'


def ask(folder: Path, toml: str, **arguments: Any) -> tuple[str, str]:
    with tool_runner(folder, toml) as runner:
        result = runner.ask("web", **arguments)
    return result.status, result.text


def test_arguments_are_escaped_in_the_url_and_declared_by_it(site: Site, tmp_path: Path) -> None:
    with tool_runner(tmp_path, table(site, "echo/{city}?unit={unit}")) as runner:
        [tool] = runner.loaded.tools
        assert tool.parameters["required"] == ["city", "unit"]
        assert runner.ask("web", city="a/../b?c ü", unit="x&y=1").text == "/echo/a%2F..%2Fb%3Fc%20%C3%BC?unit=x%26y%3D1"
        assert "cannot be '..'" in runner.ask("web", city="..", unit="C").text
        missing = runner.ask("web", city="Rome")
    assert (missing.status, missing.text) == (
        "error",
        "error: CallFailed: the arguments do not fit: arguments: 'unit' is a required property",
    )


def test_arguments_that_are_not_in_the_url_are_query_or_body(site: Site, tmp_path: Path) -> None:
    schema = (
        'parameters = {type = "object", properties = {q = {type = "string"}, n = {type = "integer", default = 3}}}\n'
    )
    assert ask(tmp_path, table(site, "echo", schema), q="tea & milk")[1] == "/echo?n=3&q=tea+%26+milk"
    ask(tmp_path, table(site, "echo", schema + 'method = "POST"\n'), q="tea")
    assert json.loads(site.asked[-1][3]) == {"q": "tea", "n": 3}
    body = 'body = {find = {text = "{q}", most = "{n}"}, note = "about {q}", where = "{place}"}\n'
    place = schema.replace("properties = {", 'properties = {place = {type = "string"}, ')
    ask(tmp_path, table(site, "echo", place + 'method = "POST"\n' + body), q="tea", n=7)
    assert json.loads(site.asked[-1][3]) == {"find": {"text": "tea", "most": 7}, "note": "about tea"}
    assert site.asked[-1][2]["Content-Type"] == "application/json"


def test_headers_take_variables_of_the_environment(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JINFERCEPT_TEST_KEY", "s3cret")
    ask(tmp_path, table(site, "echo", 'headers = {Authorization = "Bearer ${JINFERCEPT_TEST_KEY}"}'))
    headers = {name.lower(): value for name, value in site.asked[-1][2].items()}
    assert headers["authorization"] == "Bearer s3cret"
    assert headers["host"] == f"127.0.0.1:{site.server_address[1]}"


def test_an_answer_that_does_not_end_is_given_up_in_time(site: Site, tmp_path: Path) -> None:
    began_s = time.monotonic()
    status, text = ask(tmp_path, table(site, "slow", "timeout_s = 0.2"))
    assert (status, text) == ("timeout", "error: TimeoutError: it took longer than 0.2 s")
    assert time.monotonic() - began_s < 30, "long before the time-out of other calls"
    assert site.left.wait(60), "the connection is closed"


def test_a_request_that_is_aborted_closes_its_connection(site: Site, tmp_path: Path) -> None:
    with tool_runner(tmp_path, table(site, "slow")) as runner:
        runner.call("r", "web")
        until(lambda: bool(site.asked))
        runner.dispatcher.cancel("r")
        assert site.left.wait(60)


def test_long_answers_are_errors_or_cut(site: Site, tmp_path: Path) -> None:
    assert "longer than 4999 bytes" in ask(tmp_path, table(site, "huge", "max_bytes = 4999"))[1]
    status, text = ask(tmp_path, table(site, "huge", "max_result_bytes = 100"))
    assert (status, len(text)) == ("ok", 100)
    assert text.endswith("x ... (cut: 5000 bytes, 100 allowed)")


def test_what_may_be_repeated_is_repeated_while_a_server_is_moody(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jinfercept.tools.http_tool._FIRST_PAUSE_S", 0.01)
    assert ask(tmp_path, table(site, "moody")) == ("ok", "at last")
    site.moods = 0
    assert ask(tmp_path, table(site, "moody", "retries = 1"))[1] == "error: CallFailed: HTTP 503: at last"
    site.moods = 0
    ask(tmp_path, table(site, "moody", 'method = "POST"'))
    assert site.moods == 1
    assert ask(tmp_path, table(site, "missing"))[1] == "error: CallFailed: HTTP 404: no such thing"


def test_a_server_that_is_not_there_is_named(site: Site, tmp_path: Path) -> None:
    status, text = ask(tmp_path, table(site, "x", "retries = 0").replace(str(site.server_address[1]), "9"))
    assert status == "error"
    assert "127.0.0.1 cannot be reached" in text


def test_redirects_stay_among_the_hosts_that_are_allowed(site: Site, tmp_path: Path) -> None:
    secret = 'headers = {X-Key = "1"}\n'
    assert ask(tmp_path, table(site, "moved/here", secret)) == ("ok", "/echo")
    assert site.asked[-1][2]["x-key" if "x-key" in site.asked[-1][2] else "X-Key"] == "1"
    number = len(site.asked)
    assert "localhost is not among the hosts" in ask(tmp_path, table(site, "moved/abroad", secret))[1]
    assert len(site.asked) == number + 1
    allow = '"127.0.0.1", "localhost"'
    assert ask(tmp_path, table(site, "moved/abroad", secret, allow)) == ("ok", "/echo")
    assert not {"x-key", "X-Key"} & set(site.asked[-1][2]), "no header for one host goes to another"
    assert "file: is no scheme" in ask(tmp_path, table(site, "moved/file"))[1]


def test_redirects_stay_at_the_ports_that_are_allowed(site: Site, tmp_path: Path) -> None:
    other = Site()
    threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
    host, port = "127.0.0.1", other.server_address[1]
    for target in (f"http://{host}:{port}/echo", f"//user@{host}:{port}/echo"):
        site.target = target
        assert f"port {port} of {host} is not among" in ask(tmp_path, table(site, "moved/to"))[1]
    assert not other.asked
    allow = f'"{host}", "{host}:{port}"'
    assert ask(tmp_path, table(site, "moved/to", allow=allow)) == ("ok", "/echo")
    assert "Authorization" not in other.asked[-1][2]
    other.shutdown()
    other.server_close()


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("a.example", "http://a.example", True),
        ("a.example", "https://a.example", True),
        ("a.example", "http://a.example:9000", True),  # as the tool's own URL
        ("a.example", "https://a.example:9000", True),
        ("a.example", "http://a.example:443", False),
        ("a.example", "http://a.example:22", False),
        ("a.example:22", "http://a.example:22", True),
        ("a.example:22", "http://a.example", False),
        ("a.example:22", "http://a.example:9000", False),
        ("a.example:80", "http://a.example", True),
        ("*.example:22", "http://a.example:22", True),
        ("*.example:22", "http://a.example", False),
        ("*.example", "http://example", False),
        ("*.example", "http://aexample", False),
        ("A.Example.", "http://a.EXAMPLE", True),
        ("a.example", "http://A.example.:9000", True),
        ("a.example", "http://a.example@b.example", False),
        ("a.example", "http://a.example:9000@b.example", False),
        ("bücher.example", "http://xn--bcher-kva.example", True),
        ("xn--bcher-kva.example:22", "http://BÜCHER.example:22", True),
        ("2606:4700::1", "http://[2606:4700:0:0::1]", True),
        ("[2606:4700::1]:22", "http://[2606:4700::1]:22", True),
        ("[2606:4700::1]:22", "http://[2606:4700::1]", False),
    ],
)
def test_a_host_is_allowed_with_the_port_that_is_named(
    monkeypatch: pytest.MonkeyPatch, allowed: str, url: str, is_allowed: bool
) -> None:
    def resolve(host: str, port: int, *args: object, **more: object) -> list[Any]:
        return [(0, 0, 0, "", ("8.8.8.8", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    hosts, target = Hosts([allowed], named=True, own_port=9000), httpx2.URL(url)
    port = target.port or {"http": 80, "https": 443}[target.scheme]
    if is_allowed:
        assert asyncio.run(hosts.address(target.host, port, target.scheme)) == "8.8.8.8"
    else:
        with pytest.raises(CallFailed, match="not among"):
            asyncio.run(hosts.address(target.host, port, target.scheme))


@pytest.mark.parametrize("entry", ["http://a", "a/b", "u@h", "*", "*.", "", "a:0", "a:70000", "a:b", "*.*.a", "[::1"])
def test_an_entry_that_is_no_host_is_an_error_of_the_file(site: Site, tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match="allow_hosts has what is no host"):
        ask(tmp_path, table(site, "echo", allow=f'"127.0.0.1", "{entry}"'))


def test_a_redirect_from_https_to_http_is_not_followed() -> None:
    url, hosts = httpx2.URL("https://8.8.8.8/"), Hosts(["8.8.8.8"], named=True)
    transport = CheckedTransport(hosts, url, (), httpx2.create_ssl_context())
    with pytest.raises(CallFailed, match="from https to http"):
        asyncio.run(transport.handle_async_request(httpx2.Request("GET", "http://8.8.8.8/")))


def test_a_redirect_that_keeps_the_method_keeps_the_body(site: Site, tmp_path: Path) -> None:
    ask(tmp_path, table(site, "moved/here/keep", 'method = "POST"\nbody = {a = 1}'))
    assert (site.asked[-1][0], site.asked[-1][3]) == ("POST", '{"a":1}')
    ask(tmp_path, table(site, "moved/here", 'method = "POST"\nbody = {a = 1}'))
    assert (site.asked[-1][0], site.asked[-1][3]) == ("GET", "")


def test_a_private_address_behind_a_name_has_to_be_allowed_by_that_name(site: Site, tmp_path: Path) -> None:
    host = 'parameters = {type = "object", properties = {host = {type = "string"}}}\n'
    toml = table(site, "echo", host, allow='"*.0.0.1", "example.com"').replace("127.0.0.1:", "{host}:")
    with tool_runner(tmp_path, toml) as runner:
        assert "private address" in runner.ask("web", host="127.0.0.1").text
        assert "not among the hosts" in runner.ask("web", host="localhost").text
    assert not site.asked


@pytest.mark.parametrize(
    ("addresses", "public"),
    [
        ("8.8.8.8 2606:4700::1111", True),
        ("127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 0.0.0.0 255.255.255.255 240.0.0.1", False),
        ("169.254.169.254 100.64.0.1 198.18.0.1 192.0.0.9 192.0.0.170 192.88.99.1 192.0.2.1", False),
        ("224.0.0.1 224.0.1.1 ff02::1 ff0e::1", False),
        (":: ::1 fe80::1%eth0 fec0::1 fd00::1 100::1 2001:db8::1 3fff::1 5f00::1 4000::1", False),
        ("::ffff:8.8.8.8 ::8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1", True),
        ("::ffff:127.0.0.1 ::ffff:a9fe:a9fe ::127.0.0.1 ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1", False),
        ("64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8 64:ff9b:1:7f00:0:100::", False),
        ("2002:7f00:1:: 2002:a9fe:a9fe::1 2002:e000:1::", False),
        ("2001:0:808:808:: 2001:0:7f00:1::80ff:fffe", False),
        ("2606:4700::5efe:8.8.8.8", True),
        ("2606:4700::5efe:10.0.0.1 2606:4700::200:5efe:10.0.0.1 64:ff9b::a00:1%eth0", False),
    ],
)
def test_public_addresses_are_told_from_private_ones_in_any_form(addresses: str, public: bool) -> None:
    assert {address: is_public(address) for address in addresses.split()} == dict.fromkeys(addresses.split(), public)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "0", "[::127.0.0.1]", "[::]"])
def test_a_private_address_in_another_spelling_is_found_when_it_is_resolved(
    site: Site, tmp_path: Path, host: str
) -> None:
    toml = table(site, "echo", allow="").replace("127.0.0.1:", f"{host}:")
    if host.startswith("["):
        with pytest.raises(ConfigError, match="a private address has to be allowed"):
            ask(tmp_path, toml)
    else:
        assert "private address" in ask(tmp_path, toml)[1]
    assert not site.asked


def test_the_address_that_was_checked_is_connected_to_whatever_a_name_server_says_later(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "64:ff9b::7f00:1"]]

    def resolve(host: str, port: int, *args: object, **more: object) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    hosts = Hosts(["moody.example"], named=False)
    assert asyncio.run(hosts.address("moody.example", 80)) == "8.8.8.8"
    with pytest.raises(CallFailed, match="private address"):
        asyncio.run(hosts.address("moody.example", 80))


def test_a_pointer_finds_the_result_in_an_answer(site: Site, tmp_path: Path) -> None:
    for pointer, text in (
        ("/hits/1/text", "second"),
        ("/hits/1/a~1b", "3"),
        ("/hits/0", '{"text": "first"}'),
    ):
        assert ask(tmp_path, table(site, "json", f'pointer = "{pointer}"')) == ("ok", text)
    assert "has nothing at /hits/2" in ask(tmp_path, table(site, "json", 'pointer = "/hits/2"'))[1]
    assert "is no JSON: /echo" in ask(tmp_path, table(site, "echo", 'pointer = "/a"'))[1]


def test_calls_wait_in_line_for_a_tool_and_the_time_counts(site: Site, tmp_path: Path) -> None:
    with tool_runner(tmp_path, table(site, "slow", "max_concurrency = 2\ntimeout_s = 1")) as runner:
        for name in ("a", "b", "c", "d"):
            runner.call(name, "web")
        results = [runner.result(name).text for name in "abcd"]
    assert sum(text.endswith("it took longer than 1 s") for text in results) == 2
    assert sum(bool(re.search(r"longer than 1 s, of which other calls took \d\.\d$", text)) for text in results) == 2
