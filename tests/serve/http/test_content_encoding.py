"""Bodies with a `Content-Encoding`: decoded within the limit of a body, or refused."""

import gzip
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.live_server import Running, running, until
from tests.support.scripted_model import Scripted
from tests.support.served import CHAT, JSON, SHORT, shape

BODY = json.dumps(SHORT[CHAT] | {"max_tokens": 1}).encode()
RAW = zlib.compressobj(wbits=-15)
MOST = 4 * 2**20


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(BODY)),
        ("X-GZIP", gzip.compress(BODY)),
        ("identity, deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=["gzip", "x-gzip", "deflate", "identity", "none"],
)
def test_a_body_with_gzip_or_deflate_is_read(served: Running, coding: str, body: bytes) -> None:
    answer = served.http.post(CHAT, content=body, headers=JSON | {"content-encoding": coding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "\xff"])
def test_other_encodings_and_several_are_415(served: Running, coding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding.encode("latin-1")}
    answer = served.http.post(CHAT, content=gzip.compress(gzip.compress(BODY)), headers=headers)
    assert (shape(answer)[0], answer.headers["accept-encoding"]) == (415, "gzip, deflate")


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", BODY),
        ("gzip", gzip.compress(BODY)[:-9]),
        ("gzip", gzip.compress(BODY) + b"x"),
        ("gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        ("deflate", gzip.compress(BODY)),
        ("deflate", RAW.compress(BODY) + RAW.flush()),
        ("deflate", zlib.compress(BODY) * 2),
        ("deflate", b"\x78"),
    ],
    ids=["plain", "cut", "rest", "members", "gzip", "raw", "twice", "short"],
)
def test_a_body_that_has_not_its_encoding_is_400(served: Running, coding: str, body: bytes) -> None:
    answer = served.http.post(CHAT, content=body, headers=JSON | {"content-encoding": coding})
    assert shape(answer) == (400, "invalid_encoding")


def test_a_bomb_is_refused_by_its_decoded_size(served: Running) -> None:
    bomb = gzip.compress(b" " * 2**25)
    assert len(bomb) < MOST // 64
    answer = served.http.post(CHAT, content=bomb, headers=JSON | {"content-encoding": "gzip"})
    assert shape(answer)[0] == 413


def test_encoded_bodies_of_one_key_hold_up_no_other(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.follow()
    decoder, blocked, go = zlib.decompressobj, threading.Semaphore(0), threading.Event()

    def slowly(wbits: int) -> Any:
        if wbits == zlib.MAX_WBITS:
            blocked.release()
            go.wait()
        return decoder(wbits)

    def ask(key: str, coding: str, body: bytes) -> int:
        headers = JSON | {"content-encoding": coding, "authorization": f"Bearer {key}"}
        return httpx2.post(f"{server.url}{CHAT}", content=body, headers=headers, timeout=30).status_code

    with running(scripted.llm, api_key=("hostile", "polite")) as server, ThreadPoolExecutor(40) as threads:
        monkeypatch.setattr(zlib, "decompressobj", slowly)
        try:
            answers = [threads.submit(ask, "hostile", "deflate", zlib.compress(BODY)) for _ in range(40)]
            until(lambda: len(server.server.server_state.tasks) == len(answers))
            assert blocked.acquire(timeout=60)
            assert ask("polite", "gzip", gzip.compress(BODY)) == 200
        finally:
            go.set()
        assert {answer.result() for answer in answers} == {200}
