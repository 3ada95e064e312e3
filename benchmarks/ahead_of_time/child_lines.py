"""Runs a bill's program that compiles, with what it is to compile on its stdin."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any


def child_lines(module: str, environment: Mapping[str, str], order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the program, as they come. Raises `RuntimeError` if it fails."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([sys.executable, "-m", module], env=environment, text=True, stderr=errors, **pipes)
        assert child.stdout is not None
        assert child.stdin is not None
        with child:
            child.stdin.write(json.dumps(order))
            child.stdin.close()
            yield from map(json.loads, child.stdout)
        if child.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"the program that compiles failed: {errors.read()[-4000:]}")
