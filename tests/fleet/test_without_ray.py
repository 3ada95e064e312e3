"""One process serves without Ray, and a missing Ray is said by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jinfercept.cli.main import main
from jinfercept.fleet.ray_start import is_private


@pytest.mark.slow
def test_one_process_imports_no_ray() -> None:
    modules = (
        "jinfercept.cli.serve, jinfercept.server.serve, jinfercept.server.app, jinfercept.fleet.front, jinfercept.llm"
    )
    code = f"import sys, {modules}, jinfercept.fleet.fan_out, jinfercept.fleet.replica_app; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_missing_ray_is_said_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "tests/golden/llama_gqa", "--port", "0", "--replicas", "2"]) == 2
    assert "pip install 'jinfercept[fleet]'" in capsys.readouterr().err


def test_a_wrong_model_is_said_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/folder/model", "--port", "0", "--replicas", "2"]) == 2
    assert "no/such/folder/model" in capsys.readouterr().err
    assert main(["serve", "x", "--replicas", "0"]) == 2
    assert "--replicas is too small" in capsys.readouterr().err


def test_a_folder_is_private_if_it_is_no_link_and_closed_to_other_users(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(0o700)
    link.symlink_to(folder)
    assert is_private(folder)
    assert not is_private(link)
    folder.chmod(0o755)
    assert not is_private(folder)
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 65534, 65534)
        assert not is_private(folder)


def test_a_database_that_cannot_be_used_is_said_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", "tests/golden/llama_gqa", "--port", "0", "--replicas", "2"]
    assert main([*command, "--state-url", "/no/such/folder/state.db"]) == 2
    assert "the file of the stored state cannot be written" in capsys.readouterr().err
