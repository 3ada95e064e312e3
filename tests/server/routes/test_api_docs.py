"""The OpenAPI document and its page: they need the key, and load nothing from other hosts."""

import base64
import re
from collections.abc import Iterator

import pytest

from tests.support.live_server import Running, running

PATHS = ("/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/openapi.json")


@pytest.fixture(scope="module")
def keyed(shared_server: Running) -> Iterator[Running]:
    """A second server on the same model, with a key."""
    with running(shared_server.llm, api_key=("one:two",)) as server:
        yield server


def basic(credentials: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}


@pytest.mark.parametrize("path", PATHS)
def test_the_docs_need_the_key_as_a_token_or_as_a_password(keyed: Running, path: str) -> None:
    for headers in ({}, {"authorization": "Basic !"}, basic("x"), basic("x:"), basic("one:two"), basic("x:one:tw")):
        answer = keyed.http.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
    for headers in ({"authorization": "Bearer one:two"}, basic(":one:two"), basic("anybody:one:two")):
        assert keyed.http.get(path, headers=headers).status_code == 200


def test_no_other_path_takes_a_password(keyed: Running) -> None:
    for path in ("/v1/models", "/live", "/inbox", "/v1/responses/one"):
        answer = keyed.http.get(path, headers=basic("x:one:two"))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    answer = keyed.http.post("/tokenize", json={"prompt": "Hi"}, headers=basic("x:one:two"))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_the_page_of_the_docs_loads_nothing_from_elsewhere(served: Running) -> None:
    page = served.http.get("/docs")
    assert "//" not in page.text.replace("<!doctype html>", "")
    named = re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page.text)
    assert [served.http.get(f"/{path}").status_code for path in named] == [200, 200]
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"http|//|\*|unsafe-eval|script-src[^;]*unsafe-inline", policy)
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/nothing", "/docs/..%2Fcore.py"):
        assert served.http.get(path).status_code == 404
