"""One process serves without Ray, and a missing Ray is said by name."""

import subprocess
import sys

import pytest

from jinfercept.cli.main import main


def _python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_one_process_imports_no_ray() -> None:
    modules = (
        "jinfercept.cli.serve, jinfercept.server.serve, jinfercept.server.app, jinfercept.fleet.front, jinfercept.llm"
    )
    code = f"import sys, {modules}, jinfercept.fleet.fan_out, jinfercept.fleet.replica_app; print('ray' in sys.modules)"
    done = _python(code)
    assert done.stdout == "False\n", done.stderr


def test_a_missing_ray_is_said_by_name() -> None:
    command = "['serve', 'tests/golden/llama_gqa', '--port', '0', '--replicas', '2']"
    done = _python(
        f"import sys; sys.modules['ray'] = None; from jinfercept.cli.main import main; sys.exit(main({command}))"
    )
    assert done.returncode == 2
    assert "pip install 'jinfercept[fleet]'" in done.stderr


def test_a_wrong_model_is_said_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/folder/model", "--port", "0", "--replicas", "2"]) == 2
    assert "no/such/folder/model" in capsys.readouterr().err
    assert main(["serve", "x", "--replicas", "0"]) == 2
    assert "--replicas is too small" in capsys.readouterr().err
