"""A server with keys, named origins and small limits: what exceeds them is refused; HEAD on every route that has GET."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import MAX_HEAD_BYTES
from tests.support.live_server import END, Running, running, until
from tests.support.responses import answer, says
from tests.support.scripted_model import Scripted
from tests.support.served import CHAT, SHORT, shape


@pytest.fixture(scope="module")
def strict(shared_server: Running) -> Iterator[Running]:
    """A second server on the same model, with small limits and two keys."""
    limits: dict[str, Any] = {"max_body_size": 2000, "timeout_keep_alive": 1, "max_queue_len": 16}
    origins = ("https://a.example",)
    with running(shared_server.llm, api_key=("one", "two"), allowed_origins=origins, **limits) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(shared_server: Running) -> Iterator[Running]:
    """One that ends connections which dawdle at once."""
    with running(shared_server.llm, api_key=("one",), header_timeout=0.3, body_timeout=0.3) as server:
        yield server


def test_keys_are_asked_for_before_anything_else(strict: Running) -> None:
    for header in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
        answer = strict.http.post(CHAT, content=b"x" * 9000, headers=header)
        assert shape(answer) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("one", "two"):
        assert strict.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert strict.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/live/", "/metrics/", "/v1/models/"])
def test_no_answer_sends_a_client_elsewhere(strict: Running, path: str) -> None:
    for method in ("GET", "POST"):
        answer = strict.http.request(method, path, headers={"host": "elsewhere.example"}, follow_redirects=False)
        assert answer.status_code in (401, 404, 405)
        assert "location" not in answer.headers


def test_two_keys_at_once_are_refused(strict: Running) -> None:
    headers = [("authorization", "Bearer one"), ("authorization", "Bearer two")]
    assert strict.http.get("/v1/models", headers=headers).status_code == 400


def test_long_paths_and_methods_are_cut_in_answers_and_logs(strict: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jinfercept.serve")
    for refused in (strict.http.get("/" + "%ff" * 5000), strict.http.request("X" * 5000, "/x")):
        assert len(refused.text) < 3000

    def logged() -> list[str]:  # by ours: another test's server may have turned on uvicorn's own log of accesses
        return [record.getMessage() for record in caplog.records if record.name == "jinfercept.serve"]

    until(lambda: len(logged()) >= 2)
    assert max(map(len, logged())) < 3000


def test_keys_and_salts_share_no_context(strict: Running) -> None:
    def cached(key: str, **more: Any) -> int:
        body = {"messages": [{"role": "user", "content": "y" * 40}], "max_tokens": 1, "temperature": 0} | more
        answer = strict.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    strict.wait_idle()
    assert (cached("one"), cached("one") > 0) == (0, True)
    assert (cached("two"), cached("two") > 0) == (0, True)
    assert (cached("one", cache_salt="s"), cached("one", cache_salt="s") > 0, cached("two", cache_salt="s")) == (
        0,
        True,
        0,
    )


def test_pages_of_named_origins_may_use_the_server(strict: Running) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    good = strict.http.options(CHAT, headers=ask | {"origin": "https://a.example"})
    assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert "access-control-allow-origin" not in strict.http.options(CHAT, headers=ask | {"origin": "https://b"}).headers


@pytest.mark.usefixtures("gate")
def test_a_full_queue_is_429_and_says_when_to_come_again(strict: Running) -> None:
    headers = {"authorization": "Bearer one"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900, "n": 16, "ignore_eos": True}
    with strict.http.stream("POST", CHAT, json=body | {"stream": True}, headers=headers):
        until(lambda: strict.llm.engine.num_waiting == 8)
        answer = strict.http.post(CHAT, json=body | {"n": 9}, headers=headers)
        assert shape(answer) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        prompts = {"prompt": ["Hi", "Ho", "Ha"], "n": 3}
        assert shape(strict.http.post("/v1/completions", json=prompts, headers=headers)) == (429, "queue_full")
        assert strict.http.post("/tokenize", json={"prompt": "Hi"}, headers=headers).status_code == 200
    strict.wait_idle()


def test_more_answers_than_may_ever_wait_are_400(strict: Running) -> None:
    headers = {"authorization": "Bearer one"}
    for path, body in ((CHAT, SHORT[CHAT] | {"n": 17}), ("/v1/completions", {"prompt": ["Hi"] * 6, "n": 3})):
        answer = strict.http.post(path, json=body, headers=headers)
        assert shape(answer) == (400, None)
        assert answer.json()["error"]["param"] == "n"


def answer_to(strict: Running, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """The answer to parts sent on a connection, and how the server ends it."""
    host, _, port = strict.url.removeprefix("http://").partition(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
            while piece := connection.recv(4096):
                got += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
    return got


def test_connections_that_dawdle_are_ended(impatient: Running) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
    began_s = time.monotonic()
    assert answer_to(impatient) == b""
    assert answer_to(impatient, head) == b""
    assert answer_to(impatient, *[b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 9], pause_s=0.05) == b""
    second = answer_to(impatient, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", head, pause_s=0.05)
    assert second.count(b"HTTP/1.1") == 1
    assert b"408 Request Timeout" in answer_to(impatient, head + b"Content-Length: 10\r\n\r\n{")
    assert time.monotonic() - began_s < ServerOptions().header_timeout
    endless = [b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * (MAX_HEAD_BYTES + 1)]
    assert answer_to(impatient, *endless)[:12] in (b"HTTP/1.1 400", b"")  # empty if the reset overtakes it


PATHS = [
    "/",
    "/openapi.json",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/live",
    "/v1/models",
    "/v1/models/x",
]


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses/none", "/v1/conversations/none", "/nothing"])
def test_head_is_answered_as_get_without_a_body(served: Running, path: str) -> None:
    head, got = served.http.head(path), served.http.get(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_of_a_route_without_get_is_405(served: Running) -> None:
    refused = served.http.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_head_of_a_stream_ends_at_once_and_leaves_the_response(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    begun = answer(served, background=True, stream=True)
    name = next(iter(begun)).response.id
    head = served.http.head(f"/v1/responses/{name}", params={"stream": "true"})
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    begun.close()
    until(lambda: served.client.responses.retrieve(name).status == "completed")
