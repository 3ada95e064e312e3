"""What programs that compile ahead of time said, kept in the cache for as long as the files that they read are the same."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.ahead_of_time.plugin import PROJECT
from jinfercept.models.embedded import cache_directory

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
"""Packages whose versions the results depend on, where they are installed."""


def kept_result(order: str, run: Callable[[], Mapping[str, Any]]) -> Any:
    """The results of a program, or those of an earlier run that was asked the same and read the same.

    Args:
        order: what the program is asked.
        run: runs it; returns its `results`, and as `sources` the files of the repository that it has read.
    """
    digest = _digest(*map(str.encode, (order, *_versions(), os.environ.get("XLA_FLAGS", ""))))
    path = cache_directory() / "aot-results" / f"asked-{digest}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        if all(_source(name) == digest for name, digest in kept["sources"].items()):
            return kept["results"]
    reported = run()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump({**reported, "sources": {name: _source(name) for name in reported["sources"]}}, file)
    os.replace(file.name, path)
    return reported["results"]


def kept_lines(
    program: str, lines: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
) -> Callable[[dict[str, Any]], Iterator[dict[str, Any]]]:
    """The same as a function that runs a bill's program, whose last line tells its sources if it is asked."""

    def kept(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        def run() -> dict[str, Any]:
            *results, last = lines({**order, "sources": True})
            return {"results": results, "sources": last["sources"]}

        yield from kept_result(f"{program} {json.dumps(order)}", run)

    return kept


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _source(name: str) -> str:
    """The digest of a file of the repository; of nothing if it is gone."""
    path = PROJECT / name
    return _digest(path.read_bytes() if path.exists() else b"")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
