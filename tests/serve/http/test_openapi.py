"""The OpenAPI document, to which the server conforms."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_server import Running, running
from tests.support.scripted_model import Scripted


@pytest.fixture(scope="module")
def keyed(shared_server: Running) -> Iterator[Running]:
    """A second server on the same model, with a key."""
    with running(shared_server.llm, api_key=("one",)) as server:
        yield server


def test_the_document_needs_a_key_and_no_page_loads_scripts(keyed: Running, served: Running) -> None:
    assert keyed.http.get("/openapi.json").status_code == 401
    assert keyed.http.get("/openapi.json", headers={"authorization": "Bearer one"}).status_code == 200
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
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
