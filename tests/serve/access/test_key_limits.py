"""Limits of keys: weights, requests in progress, rates, and a file that is read again."""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.serve.access import key_limits
from jinfercept.serve.access.key_file import KeyRules, key_digest
from jinfercept.serve.access.key_limits import KeyLimits
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.state.store import StoredResponse
from tests.support.chat_templates import QWEN
from tests.support.engine_state import engine_of
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import QUESTION, answer, says
from tests.support.scripted_model import Make, Scripted
from tests.support.tool_server import ALL, BUY, asks, shop
from tests.support.tool_server import QUESTION as SHOPPING
from tests.support.tool_server import says as says_beside_tools


@pytest.fixture
def shared(scripted: Scripted) -> Iterator[Running]:
    """A server for two keys, with room for a few responses and two places in the background for each key."""
    keys = ("hostile", "polite")
    limits: Any = {"max_state_bytes": 24_000, "max_background_responses": 2}
    with running(scripted.llm, api_key=keys, **limits) as server:
        yield server


@pytest.fixture
def polite(shared: Running) -> Iterator[OpenAI]:
    """A client of the second key."""
    with OpenAI(base_url=f"{shared.url}/v1", api_key="polite", max_retries=2, timeout=60) as client:
        yield client


def test_one_key_does_not_push_out_what_another_has_stored(shared: Running, polite: OpenAI, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    mine = polite.responses.create(model=MODEL, input=QUESTION, temperature=0)
    names = [answer(shared).id for _ in range(34)]
    until(lambda: not _is_stored(shared.client, names[-12]))
    assert _is_stored(shared.client, names[-1])
    assert polite.responses.retrieve(mine.id) == mine


@pytest.mark.usefixtures("gate")
def test_a_key_has_so_many_responses_in_the_background(shared: Running, polite: OpenAI, scripted: Scripted) -> None:
    scripted.follow()
    endless = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    names = [answer(shared, background=True, **endless).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="have 2 responses in the background") as refused:
        answer(shared, background=True)
    assert refused.value.response.headers["Retry-After"] == "1"
    polite.responses.create(model=MODEL, input=QUESTION, background=True, max_output_tokens=1)
    for name in names:
        shared.client.responses.cancel(name)
    read = shared.client.responses.retrieve  # a busy machine commits their ends behind the answers
    until(lambda: {read(name).status for name in names} == {"cancelled"})
    names.append(answer(shared, background=True, max_output_tokens=1).id)
    until(lambda: shared.client.responses.retrieve(names[-1]).status == "incomplete")


def test_events_for_which_there_is_no_room_are_not_kept(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "It costs 23. " * 30 + END)
    kept = ExpiringEntries[Any](Quota(9, 2_000), 60.0, time.monotonic)
    monkeypatch.setattr(served.service.state, "events", kept)
    whole = answer(served, background=True, stream=True)
    name = next(iter(whole)).response.id
    with pytest.raises(openai.APIError, match="no room to keep events"):
        list(whole)
    until(lambda: served.client.responses.retrieve(name).status == "completed")
    with pytest.raises(openai.BadRequestError, match="events of this response are not kept here"):
        served.client.responses.retrieve(name, stream=True)
    assert len(kept) == 0


def _is_stored(client: OpenAI, name: str) -> bool:
    try:
        return client.responses.retrieve(name).id == name
    except openai.NotFoundError:
        return False


LONG: dict[str, Any] = {"prompt": "Go on.", "max_tokens": 1900, "ignore_eos": True, "temperature": 1, "stream": True}
SHORT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
FILE = """
[few]
key = "few"
max_concurrent = 2
weight = 3

[one]
key = "one"
max_concurrent = 1

[slow]
key = "slow"
requests_per_minute = 2

[small]
key = "small"
tokens_per_minute = 20

[free]
key = "free"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.fixture
def limited(scripted: Scripted, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(key_limits, "POLL_S", 0.02)
    scripted.follow()
    with running(scripted.llm, api_key_file=str(path)) as server:
        yield server
        server.wait_idle()


def as_key(server: Running, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"})


def ask(server: Running, key: str, **more: Any) -> httpx2.Response:
    with as_key(server, key) as http:
        return http.post("/v1/completions", json=SHORT | more)


@contextmanager
def streaming(server: Running, key: str, n: int = 1) -> Iterator[Iterator[bytes]]:
    """Long answers, whose first piece has come."""
    with as_key(server, key) as http, http.stream("POST", "/v1/completions", json=LONG | {"n": n}) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        yield pieces


def code(answer: httpx2.Response) -> str:
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    return answer.json()["error"]["code"]


@pytest.mark.usefixtures("gate")
def test_a_key_has_so_many_requests_in_progress(limited: Running) -> None:
    with streaming(limited, "few", 2), as_key(limited, "few") as http:
        [weight] = {sequence.weight for sequence in engine_of(limited.llm).scheduler.unfinished}
        assert weight == 3.0
        assert code(ask(limited, "few")) == "concurrency_limit_exceeded"
        assert ask(limited, "free").status_code == 200
        assert http.get("/v1/models").status_code == 200, "only what generates counts"
    until(lambda: ask(limited, "few").status_code == 200)
    assert ask(limited, "few", n=3).status_code == 400, "never in time"
    metrics = limited.http.get("/metrics").text
    assert 'refused_requests_total{code="concurrency_limit_exceeded"' in metrics


def test_responses_that_are_being_stored_count_as_in_progress(
    limited: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, begun, go = limited.service.state.finish, threading.Semaphore(0), threading.Event()

    async def slowly(stored: StoredResponse) -> None:
        begun.release()
        await asyncio.to_thread(go.wait)
        await finish(stored)

    monkeypatch.setattr(limited.service.state, "finish", slowly)
    with as_key(limited, "few") as http, ThreadPoolExecutor() as threads:
        try:
            body = {"input": "Hi", "max_output_tokens": 16}
            answers = [threads.submit(http.post, "/v1/responses", json=body) for _ in range(2)]
            for _ in answers:
                assert begun.acquire(timeout=60)
            assert code(ask(limited, "few")) == "concurrency_limit_exceeded"
        finally:
            go.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_request_is_in_progress_while_the_calls_behind_its_end_run(
    make_scripted: Make, path: Path, tmp_path: Path
) -> None:
    scripted = make_scripted(QWEN)
    with shop(scripted, tmp_path, patience_s=60, api_key_file=str(path)) as server:
        says_beside_tools(scripted, server, asks("buy", "lamp") + "\n" + asks("hang"), SHOPPING, [BUY])
        body = {"messages": SHOPPING, "tools": [BUY], "temperature": 0, "max_tokens": 200, **ALL}
        connection = HTTPConnection(server.url.removeprefix("http://"))
        headers = {"Content-Type": "application/json", "Authorization": "Bearer one"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        until((tmp_path / "begun").exists)
        assert code(ask(server, "one")) == "concurrency_limit_exceeded"
        connection.close()
        until((tmp_path / "cancelled").exists)


def test_a_key_has_so_many_requests_and_tokens_a_minute(limited: Running) -> None:
    assert [ask(limited, "slow").status_code for _ in range(3)] == [200, 200, 429]
    assert code(ask(limited, "slow")) == "rate_limit_exceeded"
    assert ask(limited, "small", max_tokens=40).status_code == 200
    refused = ask(limited, "small")
    assert code(refused) == "rate_limit_exceeded"
    assert int(refused.headers["Retry-After"]) > 30, "the debt of the first answer is paid first"


@pytest.mark.usefixtures("gate")
def test_a_changed_file_counts_and_a_broken_one_changes_nothing(
    limited: Running, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with streaming(limited, "few") as pieces:
        replace(path, '[free]\nkey = "free"\nmax_concurrent = 1\n[new]\nkey = "secret-new"\n')
        until(lambda: ask(limited, "secret-new").status_code == 200)
        assert [ask(limited, key).status_code for key in ("few", "free")] == [401, 200]
        assert ask(limited, "free", n=2).status_code == 400
        next(pieces)
    with caplog.at_level(logging.INFO, logger="jinfercept.serve"):
        replace(path, '[new]\nkey = "secret-new"\nweight = "much"\n')
        until(lambda: any("not used" in line for line in caplog.messages))
        assert ask(limited, "secret-new").status_code == 200
        path.unlink()
        until(lambda: sum("not used" in line for line in caplog.messages) == 2)
        assert ask(limited, "free").status_code == 200
    assert "keys.toml" in caplog.text
    assert "[new] weight" in caplog.text
    assert "secret-new" not in caplog.text


def replace(path: Path, text: str) -> None:
    """As an editor or a deployment does, at once."""
    other = path.with_suffix(".new")
    other.write_text(text, encoding="utf-8")
    os.replace(other, path)


def test_a_bucket_refills_as_time_passes_and_debts_are_paid() -> None:
    now = [0.0]
    rules = KeyRules(name="a", requests_per_minute=60, tokens_per_minute=600)
    limits = KeyLimits(lambda tenant: rules, lambda: now[0])
    tenant = key_digest("a")
    for _ in range(60):
        limits.check(tenant, 1, 0)
    with pytest.raises(ApiError) as refused:
        limits.check(tenant, 1, 0)
    assert refused.value.headers == {"Retry-After": "1"}
    now[0] += 1.0
    limits.check(tenant, 1, 0)
    limits.began(tenant, 1, 500)
    limits.ended(tenant, 1, 700)
    now[0] += 30.0
    with pytest.raises(ApiError, match="600 tokens") as refused:
        limits.check(tenant, 1, 0)
    wait_s = int((refused.value.headers or {})["Retry-After"])
    now[0] += wait_s
    limits.check(tenant, 1, 0)


def test_idle_keys_that_are_gone_are_forgotten() -> None:
    limits = KeyLimits(lambda tenant: KeyRules(name=""), time.monotonic)
    for number in range(5):
        limits.began(f"{number}", 1, 1)
    for number in range(4):
        limits.ended(f"{number}", 1, 1)
    limits.forget(lambda tenant: tenant == "0")
    assert sorted(limits._uses) == ["0", "4"]  # pyright: ignore[reportPrivateUsage]
