"""The OpenAPI document, to which the server conforms, and the page that shows it: their key, and nothing from elsewhere."""

import base64
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_server import Running, running
from tests.support.scripted_model import Scripted

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


_CHECKS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance")
"""Valid bodies may be refused for reasons that a document cannot express: templates, long contexts, grammars."""
_MOST_S = 600.0
"""Seconds after which the process is ended: examples take the longer, the busier the machine is."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_answer_that_the_document_does_not_know(
    served: Running, scripted: Scripted, tmp_path: Path
) -> None:
    scripted.follow(end_every=16)
    phases = (
        "--max-examples",
        "20",
        "--phases",
        "examples,coverage,fuzzing",
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--max-response-time",
        "60",
    )
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", *phases, *_CHECKS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=_MOST_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
