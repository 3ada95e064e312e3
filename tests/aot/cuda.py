"""Compilations for a GPU that is not there, in a process of their own that reports."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.ahead_of_time.plugin import PROJECT, PluginMissingError, environment

PROGRAM = Path(__file__).parent / "compile_for_cuda.py"


def compile_for(gpu: str, generation: str = "cuda13", **options: Any) -> dict[str, dict[str, Any]]:
    """What `compile_for_cuda.py` says of what is asked, or said when the files that it reads were the same.

    Skips the test where the plugin cannot be had.
    """
    try:
        variables = environment(generation)
    except PluginMissingError as error:
        pytest.skip(str(error))
    order = json.dumps({"gpu": gpu, "generation": generation} | options)
    digest = _digest(*map(str.encode, (order, jax.__version__, variables.get("XLA_FLAGS", ""))))
    kept = Path(variables["AOT_RESULTS"], f"asked-{digest}.json")
    if (results := _kept(kept)) is not None:
        return results
    done = subprocess.run(
        [sys.executable, PROGRAM], input=order, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reported = json.loads(done.stdout)
    _keep(kept, reported | {"sources": {name: _source(name) for name in reported["sources"]}})
    return reported["results"]


def _kept(path: Path) -> dict[str, dict[str, Any]] | None:
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    same = all(_source(name) == digest for name, digest in kept["sources"].items())
    return kept["results"] if same else None


def _keep(path: Path, kept: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(kept, file)
    os.replace(file.name, path)


def _source(name: str) -> str:
    """The digest of a file of the repository; of nothing if it is gone."""
    path = PROJECT / name
    return _digest(path.read_bytes() if path.exists() else b"")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
