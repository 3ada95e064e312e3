"""Compilations for a GPU that is not there, in a process of their own that reports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError, environment
from tests.support.kept_results import kept_result

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

    def run() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, PROGRAM], input=order, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return kept_result(order, run)
