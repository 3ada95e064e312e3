"""Pauses, sleep and new weights of a server, and who may ask for them."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import JinferceptError
from jinfercept.llm import LLM
from jinfercept.start import weights as served_weights
from tests.support.gate import closed_gate
from tests.support.live_server import MODEL, Running, running, until
from tests.support.scripted_model import Scripted
from tests.support.tiny_model import GOLDEN, tiny_llm
from tests.support.tool_server import ALL, QUESTION, asks, says, shop

TRAINER = """
import sys, time
from http.client import HTTPConnection

def post(path, body):
    connection = HTTPConnection(sys.argv[1])
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection

calling = post("/v1/chat/completions", sys.argv[4])
sys.stdin.readline()  # its tool runs
answer = post("/v1/completions", sys.argv[3]).getresponse()
answer.read(1)
print(post(sys.argv[2], "").getresponse().status, flush=True)
time.sleep(600)
"""
GROUP: Any = {"prompt": "Hi", "n": 4, "stream": True, "return_token_ids": True, "max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("pause", ["/pause", "/pause?timeout_s=0.3"])
def test_a_trainer_that_is_killed_leaves_a_whole_server(scripted: Scripted, tmp_path: Path, pause: str) -> None:
    folder = str(tmp_path)
    with shop(scripted, tmp_path, patience_s=600, weights_dir=folder) as server, closed_gate(scripted.llm, 99):
        says(scripted, server, asks("hang"), QUESTION)
        calling = {"model": MODEL, "messages": QUESTION, "temperature": 0, **ALL}
        bodies = [json.dumps(body) for body in ({"model": MODEL, **GROUP}, calling)]
        command = [sys.executable, "-c", TRAINER, server.url.removeprefix("http://"), pause, *bodies]
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            until(lambda: (tmp_path / "begun").exists())
            trainer.stdin.write(b"\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == b"200\n"
            assert (server.state.num_running, server.state.num_intercepted) == (4, 1)
        finally:
            trainer.kill()
            trainer.communicate()
        until(lambda: (tmp_path / "cancelled").exists())
        server.wait_idle()  # the pages are there again, whether it is paused or not
        answers = list[Any]()
        body = {"model": MODEL, "prompt": "Ho", "max_tokens": 3, "ignore_eos": True}
        other = threading.Thread(target=lambda: answers.append(server.http.post("/v1/completions", json=body)))
        if pause == "/pause":
            assert server.http.get("/health").json() == {"status": "sleeping"}
            assert "jinfercept:sleeping{" in (page := server.http.get("/metrics").text)
            assert [line[-4:] for line in page.splitlines() if line.startswith("jinfercept:sleeping")] == [" 1.0"]
            other.start()
            until(lambda: server.llm.engine.num_waiting == 1)
            server.http.post("/resume")
        else:
            other.start()
        other.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 3
        assert server.http.get("/health").json() == {"status": "ok"}


BODY = {
    "model": MODEL,
    "prompt": [1, 2, 3],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_loss_mask": True,
}
PATHS = ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `--weights-dir`: the served checkpoint, one with other weights, and one of another model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("same", "other"):
        shutil.copytree(GOLDEN / "llama_gqa", folder / name)
    weights = load_file(folder / "other" / "model.safetensors")
    save_file(
        {name: value[..., ::-1].copy() for name, value in weights.items()}, folder / "other" / "model.safetensors"
    )
    shutil.copytree(GOLDEN / "gemma2", folder / "gemma2")
    (folder / "out").symlink_to(GOLDEN / "llama_gqa")
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(kv_tokens=512, max_model_len=128) as llm:
        yield llm


@pytest.fixture
def served(llm: LLM, folder: Path) -> Iterator[Running]:
    with running(llm, weights_dir=str(folder)) as server:
        yield server


def tokens(server: Running) -> tuple[list[int], int]:
    """The tokens of an answer, and the version of the weights that generated the first."""
    choice = server.http.post("/v1/completions", json=BODY).json()["choices"][0]
    return choice["token_ids"], choice["weight_versions"][0]


def test_a_server_takes_the_weights_of_a_checkpoint(served: Running) -> None:
    before, version = tokens(served)
    answer = served.http.post("/update_weights", json={"path": "other"})
    assert answer.json() == {"weights_version": version + 1}
    changed = tokens(served)
    assert changed[0] != before
    assert changed[1] == version + 1
    for path in ("gemma2", "nowhere", "../llama_gqa", "out", "/etc", "same\x00"):
        assert served.http.post("/update_weights", json={"path": path}).status_code == 400, path
    assert served.http.post("/update_weights", json={"path": "same", "mode": "wait"}).status_code == 400
    assert tokens(served) == changed
    served.http.post("/update_weights", json={"path": "same", "mode": "keep"})
    assert tokens(served) == (before, version + 2)


@pytest.mark.parametrize(
    ("path", "end"), [("/pause", "/resume"), ("/sleep?level=1", "/wake_up"), ("/sleep?level=2", "/resume")]
)
def test_requests_wait_while_it_sleeps(served: Running, path: str, end: str) -> None:
    expected = tokens(served)[0]
    assert served.http.post(path).json() == {"is_sleeping": True}
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.http.get("/health").json() == {"status": "sleeping"}
    answers = list[Any]()
    waiting = threading.Thread(target=lambda: answers.append(tokens(served)))
    waiting.start()
    while not served.llm.engine.num_waiting:
        assert waiting.is_alive()
    assert not answers
    assert served.http.post(end).json() == {"is_sleeping": False}
    waiting.join()
    assert answers[0][0] == expected
    assert served.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/pause?", "/sleep?level=2&"])
def test_a_sleep_ends_when_its_time_is_over(served: Running, path: str) -> None:
    expected = tokens(served)
    served.http.post(f"{path}timeout_s=0.05")
    assert tokens(served) == expected  # waits for the end of the sleep
    assert not served.llm.is_sleeping
    served.http.post(f"{path}timeout_s=600")
    served.http.post("/pause")  # what was agreed before does not count
    assert (served.llm.is_sleeping, served.service.waking) == (True, None)
    served.http.post("/pause?timeout_s=0.2")
    served.http.post("/resume")
    assert served.service.waking is None
    for wrong in ("0", "-1", "nan", "inf", "soon", "1e9"):
        assert served.http.post(f"{path}timeout_s={wrong}").status_code == 400
    assert tokens(served) == expected


def test_a_sleep_that_cannot_end_in_time_says_so(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(llm: LLM) -> None:
        raise JinferceptError("there are no weights", got="none", fix="give some")

    with monkeypatch.context() as patched:
        patched.setattr(LLM, "wake", fail)
        served.http.post("/pause?timeout_s=0.01")
        until(lambda: "the engine sleeps on: there are no weights" in caplog.text)
    served.http.post("/resume")


def test_an_update_whose_client_is_gone_is_whole(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    version, begun, go = tokens(served)[1], threading.Event(), threading.Event()
    read = served_weights.lazy_params

    def slowly(*arguments: Any, **named: Any) -> Any:
        begun.set()
        go.wait(60)
        return read(*arguments, **named)

    monkeypatch.setattr(served_weights, "lazy_params", slowly)
    client = HTTPConnection(served.url.removeprefix("http://"))
    client.request("POST", "/update_weights", '{"path": "other"}', {"Content-Type": "application/json"})
    assert begun.wait(60)
    client.close()
    before = tokens(served)  # requests do not wait for it
    assert before[1] == version
    go.set()
    until(lambda: served.llm.weights_version == version + 1)
    assert tokens(served)[0] != before[0]
    served.http.post("/update_weights", json={"path": "same"})
    assert tokens(served) == (before[0], version + 2)


def test_only_operators_ask_where_there_are_keys(llm: LLM, folder: Path) -> None:
    with running(llm, weights_dir=str(folder), api_key=("somebody",), operator_key=("boss",)) as server:
        for path in PATHS:
            headers = (
                {"Authorization": f"Bearer {key}"} for key in ("wrong", "somebody", "boss")
            )  # an unknown key, a client's, an operator's
            json = {"path": "same"} if path == "/update_weights" else None
            statuses = [server.http.post(path, json=json, headers=header).status_code for header in headers]
            assert statuses == [401, 403, 200]
            llm.wake()


def test_without_the_folder_nobody_asks(llm: LLM) -> None:
    with running(llm) as server:
        assert [server.http.post(path).status_code for path in PATHS] == [404] * len(PATHS)


def test_hostile_checkpoints_and_bodies_change_nothing(served: Running, folder: Path, tmp_path: Path) -> None:
    before = tokens(served)
    for name in ("truncated", "linked", "absent"):
        shutil.copytree(GOLDEN / "llama_gqa", folder / name)
    whole = folder / "truncated" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])
    (folder / "absent" / "model.safetensors").unlink()
    (folder / "linked" / "model.safetensors").unlink()
    shutil.copy(GOLDEN / "llama_gqa" / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / "linked" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    for name in ("truncated", "linked", "absent"):
        assert served.http.post("/update_weights", json={"path": name}).status_code == 400, name
    for file in ("model.safetensors", "config.json"):  # of a trainer that was killed while it wrote
        shutil.rmtree(folder / "truncated")
        shutil.copytree(GOLDEN / "llama_gqa", folder / "truncated")
        half, content = folder / "truncated" / file, (GOLDEN / "llama_gqa" / file).read_bytes()
        for length in (0, 5, 100, len(content) // 2, len(content) - 2):
            half.write_bytes(content[:length])
            answer = served.http.post("/update_weights", json={"path": "truncated"})
            assert answer.status_code == 400, length
            assert "fix: " in answer.json()["error"]["message"]
            assert tokens(served) == before
    bodies: list[Any] = [{}, [], {"path": 3}, {"path": ""}, {"path": "x" * 10_000}, {"path": ["same"] * 100_000}]
    for body in bodies:
        assert served.http.post("/update_weights", json=body).status_code == 400
    assert served.http.post("/sleep?level=9").status_code == 400
    assert tokens(served) == before


def test_updates_at_once_come_one_after_the_other_beside_requests(served: Running) -> None:
    version, answers = tokens(served)[1], list[Any]()

    def update(mode: str) -> None:
        answers.append(served.http.post("/update_weights", json={"path": "same", "mode": mode}).json())

    threads = [threading.Thread(target=update, args=(mode,)) for mode in ("keep", "recompute", "keep")]
    threads += [threading.Thread(target=tokens, args=(served,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["weights_version"] for answer in answers) == [version + 1, version + 2, version + 3]
    served.llm.engine.check_pages()
    assert tokens(served)[1] == version + 3
