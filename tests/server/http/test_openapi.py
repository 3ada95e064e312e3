"""The server conforms to its OpenAPI document, for valid and for invalid requests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import Running
from tests.support.scripted_model import Scripted

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
