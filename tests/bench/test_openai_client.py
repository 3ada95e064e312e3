"""The client that measures: what it notes of an answer, and that every way in which a server can fail is a reply."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from jinfercept.bench import openai_client
from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply, make_target
from jinfercept.bench.session_shape import tool_times
from jinfercept.errors import ConfigError
from tests.support.fake_openai import FakeServer, fake_openai


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_openai() as server:
        yield server


def ask(url: str, model: str, timeout_s: float = 60.0, times: int = 1) -> list[ClientReply]:
    """The same conversation, one request after another."""

    async def go() -> list[ClientReply]:
        async with Client(make_target(url, None, timeout_s)) as client:
            return [await client.ask(Style().talk(model, 5, "a").ask(3)) for _ in range(times)]

    return asyncio.run(go())


def test_a_reply_has_times_of_its_pieces_and_counts_of_the_server(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_client, "time", SimpleNamespace(perf_counter=count().__next__))
    first, second = ask(fake.url, "good", times=2)
    assert (first.error, first.text, first.prompt_tokens, first.completion_tokens) == (None, "so0 so1 so2 ", 6, 3)
    assert (first.cached_tokens, second.cached_tokens) == (0, 6)
    assert len(first.piece_s) == 3
    assert first.sent_s < first.piece_s[0] < first.piece_s[1] < first.piece_s[2] < first.end_s
    assert (first.first_s, first.seconds) == (first.piece_s[0] - first.sent_s, first.end_s - first.sent_s)


@pytest.mark.parametrize(
    ("model", "error", "detail"),
    [
        ("busy", "HTTP 429", "come again"),
        ("broken", "HTTP 500", "<html>no"),
        ("whole", "malformed", "no events"),
        ("gone", "disconnected", ""),
        ("cut", "disconnected", ""),
        ("stopped", "disconnected", ""),
        ("odd", "malformed", ""),
        ("list", "malformed", ""),
        ("failing", "error in the stream", "it broke"),
    ],
)
def test_a_server_that_fails_is_a_reply_that_says_how(fake: FakeServer, model: str, error: str, detail: str) -> None:
    for reply in ask(fake.url, model, times=2):
        assert reply.error == error
        assert detail in reply.detail
        assert reply.end_s >= reply.sent_s


@pytest.mark.parametrize("model", ["silent", "trickling"])
def test_a_server_that_never_ends_runs_into_the_timeout(fake: FakeServer, model: str) -> None:
    [reply] = ask(fake.url, model, timeout_s=0.2)
    assert reply.error == "timeout"
    assert 0.2 <= reply.seconds < 30


def test_a_server_that_is_not_there_is_no_connection() -> None:
    with fake_openai() as fake:
        url = fake.url
    [reply] = ask(url, "good")
    assert reply.error == "no connection"


def test_a_response_that_is_not_ended_after_its_last_event_does_not_count_as_longer(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, finish = [5.0], openai_client._finish

    async def finish_late(pieces: AsyncIterator[bytes]) -> None:
        await finish(pieces)
        now[0] += 1.0

    monkeypatch.setattr(openai_client, "_CLOSING_S", 0.1)
    monkeypatch.setattr(openai_client, "_finish", finish_late)
    monkeypatch.setattr(openai_client, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    [reply] = ask(fake.url, "lingering")
    assert (reply.error, reply.seconds, now) == (None, 0.0, [6.0])


def test_what_a_server_does_not_count_is_not_made_up(fake: FakeServer) -> None:
    [reply] = ask(fake.url, "uncounted")
    assert (reply.error, reply.prompt_tokens, reply.cached_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://a:8000", "a:8000", "http://a:8000/v1"),
        ("http://a/v1/", "a", "http://a/v1"),
        ("ours=https://a/openai/v1", "ours", "https://a/openai/v1"),
    ],
)
def test_a_server_is_a_url_with_or_without_a_name(text: str, name: str, url: str) -> None:
    assert make_target(text, None, 1.0)[:2] == (name, url)


@pytest.mark.parametrize("text", ["", "a:8000", "ftp://a", "http://"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        make_target(text, None, 1.0)


@pytest.mark.parametrize("text", ["", "soon", "-1", "exp:", "exp:1,2", "gamma:1", "lognormal:1", "inf", "nan"])
def test_tool_times_that_cannot_be_drawn_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tool-seconds"):
        tool_times(text)
