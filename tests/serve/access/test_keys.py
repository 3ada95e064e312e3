"""API keys: the operator's file, and how requests of several keys share the engine."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jinfercept.errors import ConfigError
from jinfercept.serve.access.key_file import KeyRules, key_digest, read_key_file
from jinfercept.serve.access.keys import Keys
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.protocols.errors import ApiError
from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted

FILE = f"""
[team-a]
key = "alpha"

[nightly]
sha256 = "{hashlib.sha256(b"beta").hexdigest()}"
priority = [5, 10]

[admin]
key = "gamma"
operator = true
priority = [-3, 3]
"""
HOSTILE: dict[str, Any] = {"prompt": "Go on.", "max_tokens": 1900, "ignore_eos": True, "n": 32, "temperature": 1}


def written(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_says_what_each_key_may_do(tmp_path: Path) -> None:
    rules = read_key_file(written(tmp_path, FILE))
    assert rules == {
        key_digest("alpha"): KeyRules(name="team-a"),
        key_digest("beta"): KeyRules(name="nightly", priority=(5, 10)),
        key_digest("gamma"): KeyRules(name="admin", operator=True, priority=(-3, 3)),
    }
    keys = Keys(ServerOptions(api_key=("delta",), api_key_file=str(tmp_path / "keys.toml")).key_rules())
    beta, gamma = keys.check("Bearer beta"), keys.check("bearer gamma")
    assert keys.check("Bearer delta") == key_digest("delta")
    assert (keys.watched_by(beta), keys.watched_by(gamma)) == (beta, None)
    assert [keys.priority(beta, priority) for priority in (-(2**31), 0, 7, 99)] == [5, 5, 7, 10]
    assert [keys.priority(key_digest("alpha"), priority) for priority in (-1, 0, 9)] == [0, 0, 9]
    assert keys.name(beta) == "nightly"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no key"),
        ("key =", "cannot be read"),
        ('key = "x"', "the file of API keys has a value outside of any table"),
        ('["a b"]\nkey = "x"', "letters"),
        ("[a]\noperator = true", "either key or sha256"),
        ('[a]\nkey = "secret-x"\nsha256 = "00"', "sha256"),
        ('[a]\nkey = "secret-x"\npriorities = [1, 2]', "priorities"),
        ('[a]\nkey = "secret-x"\npriority = [2, 1]', "[LEAST, MOST]"),
        ('[a]\nkey = "secret-x"\npriority = 2', "priority"),
        (f'[a]\nsha256 = "{key_digest("")}"', "empty key"),
        ('[a]\nkey = " secret-x"', "blank"),
        ('[a]\nkey = "secret-x"\n[b]\nkey = "secret-x"', "a, b"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_its_keys_are_not_shown(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(api_key_file=written(tmp_path, text))
    assert message in str(caught.value)
    assert "secret-x" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " ", "a "])
def test_a_key_that_no_client_could_send_is_refused_at_the_start(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="empty, or has blanks"):
        ServerOptions(api_key=(key,))
    with pytest.raises(ConfigError, match="empty, or has blanks"):
        ServerOptions(operator_key=(key,))
    monkeypatch.setenv("JINFERCEPT_API_KEY", key)
    with pytest.raises(ConfigError, match="JINFERCEPT_API_KEY"):
        ServerOptions()


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ApiError):
        Keys({key_digest(""): KeyRules(name="nothing")}).check("Bearer ")


@pytest.fixture(scope="module")
def two_keys(shared_server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = written(tmp_path_factory.mktemp("keys"), FILE)
    with running(shared_server.llm, api_key=("hostile", "polite"), api_key_file=path, max_queue_len=96) as server:
        yield server
        server.wait_idle()


def as_key(server: Running, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("priority", [0, -(2**31)])
def test_a_key_that_floods_the_engine_keeps_nobody_else_waiting(
    two_keys: Running, scripted: Scripted, priority: int
) -> None:
    """Three loops of 32 long answers with any priority, beside a key with one short request at a time."""
    scripted.follow()
    closed = threading.Event()

    def flood() -> None:
        with (
            as_key(two_keys, "hostile") as http,
            http.stream("POST", "/v1/completions", json=HOSTILE | {"priority": priority, "stream": True}) as answer,
        ):
            for _ in answer.iter_raw():
                if closed.is_set():
                    return

    floods = [threading.Thread(target=flood) for _ in range(3)]
    for thread in floods:
        thread.start()
    try:
        until(lambda: two_keys.state.num_running == 8 and two_keys.state.num_waiting >= 80)
        before = two_keys.state.counts.finished.total()
        with as_key(two_keys, "polite") as http:
            for _ in range(5):
                answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 8, "ignore_eos": True})
                assert answer.json()["usage"]["completion_tokens"] == 8
            several = HOSTILE | {"n": 10, "max_tokens": 2}
            assert http.post("/v1/completions", json=several).status_code == 200, "its share of the queue is free"
        with as_key(two_keys, "hostile") as http:
            refused = http.post("/v1/completions", json=HOSTILE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        finished = two_keys.state.counts.finished.total() - before
        assert finished - 5 - 10 < 8, "the polite key did not wait for the other one's answers"
    finally:
        closed.set()
        for thread in floods:
            thread.join()


def test_the_log_names_the_key_and_does_not_show_it(
    two_keys: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="jinfercept.serve"), as_key(two_keys, "beta") as http:
        assert http.get("/v1/models").status_code == 200
        until(lambda: any("key=nightly" in line for line in caplog.messages))
    assert "beta" not in caplog.text
