"""Bodies with a `Content-Encoding`: decoded within the limit of a body, or refused."""

import gzip
import json
import zlib

import pytest

from tests.support.http_errors import CHAT, JSON, SHORT, shape
from tests.support.live_server import Running

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
