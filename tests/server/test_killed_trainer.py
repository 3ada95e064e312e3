"""A trainer that is killed while the server is paused for it, in the middle of a group whose tools run."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.gate import closed_gate
from tests.support.live_server import MODEL, until
from tests.support.scripted_model import Scripted
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
