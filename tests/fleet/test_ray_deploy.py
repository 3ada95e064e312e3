"""A server with a Ray of its own, an application behind the proxy of Ray's own command, and one without Ray."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml

from jinfercept.cli.main import main
from jinfercept.fleet.ray_deploy import LOCAL_VARIABLES, is_private
from jinfercept.fleet.replica_app import own_seed
from tests.soak.model import write_model
from tests.support.live_server import until
from tests.support.pretend import missing

ENGINE = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_tokens": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "swap_space": 0.001,
    "profile": "paper-gptj-6b-a100",
}


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which is killed if the test fails."""
    with subprocess.Popen(command, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fleet_of_rays_own_command_answers_behind_its_proxy(tmp_path: Path) -> None:
    write_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = {"served_model_name": ["tiny"], "api_key": ["secret"], "drain_timeout": 5}
    application: dict[str, Any] = {
        "name": "tiny",
        "route_prefix": "/",
        "import_path": "jinfercept.fleet.ray_deploy:application",
    }
    application["args"] = {"model": str(tmp_path), "replicas": 2, "engine": ENGINE, "server": server}
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [application]}))
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    with running(command, env=os.environ | LOCAL_VARIABLES | {"RAY_AUTH_TOKEN": "0" * 64}) as process:
        key = {"authorization": "Bearer secret"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=key) as http:
            until(lambda: health(http) == {"status": "ok", "replicas": 2}, 300)
            for _ in range(4):  # calls of one request to both replicas at once
                assert health(http) == {"status": "ok", "replicas": 2}
                time.sleep(1.1)
            assert http.get("/metrics").text.count("vllm:prompt_tokens_total{") == 2
            body = {"prompt": [70, 71, 72], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answers = [http.post("/v1/completions", json=body) for _ in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
            assert all(answer.headers["x-jinfercept-replica"] for answer in answers)
            assert http.post("/v1/completions", json=body, headers={"authorization": ""}).status_code == 401
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive


def health(http: httpx2.Client) -> Any:
    """The health of a fleet; None before it answers."""
    with suppress(httpx2.HTTPError, ValueError):
        return http.get("/health").json()


def test_replicas_have_seeds_of_their_own_which_depend_on_the_fleets() -> None:
    seeds = [own_seed(seed, name) for seed in (0, 1) for name in ("one", "two")]
    assert len(set(seeds)) == 4
    assert own_seed(0, "one") == seeds[0]


@pytest.mark.slow
def test_one_process_imports_no_ray() -> None:
    modules = (
        "jinfercept.cli.serve, jinfercept.serve.serve, jinfercept.serve.app, jinfercept.fleet.front, jinfercept.llm"
    )
    code = f"import sys, {modules}, jinfercept.fleet.fan_out, jinfercept.fleet.replica_app; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_missing_ray_is_said_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    missing(monkeypatch, "ray", "ray.serve")
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
