"""Two replicas on Ray Serve behind the command's front: one fleet for the whole module."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx2
import psutil
import pytest
from openai import APIError, OpenAI

from benchmarks.servers import child_process
from jinfercept.fleet.ray_deploy import is_private
from tests.soak.model import write_model

FLAGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_tokens": 4096,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "swap_space": 0.001,
    "profile": "paper-gptj-6b-a100",
    "served_model_name": "tiny",
    "drain_timeout": 5,
}
LETTERS = list(range(64, 90))
"""Tokens of the letters, so that answers are the same text and the same tokens."""


METHODS = (
    "/ray.serve.ASGIService/HandleRequest",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
)
"""Of a replica's port for its front, of every worker of Ray, and of Ray's head."""


class Fleet(NamedTuple):
    """A command that serves two replicas.

    Attributes:
        process: of the command.
        http, client: for its front.
    """

    process: psutil.Process
    http: httpx2.Client
    client: OpenAI

    def replicas(self) -> list[psutil.Process]:
        """Processes of the replicas."""
        return [child for child in self.process.children(recursive=True) if "ServeReplica" in _name(child)]

    def chat(self, *texts: str, **fields: Any) -> httpx2.Response:
        """A conversation whose texts alternate between a user and an assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        body = {
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": LETTERS,
        }
        return self.http.post("/v1/chat/completions", json=body | fields)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _writes_log_of(process: psutil.Process, replica: str) -> bool:
    return any(file.path.endswith(f"_{replica}.log") for file in process.open_files())


def _until(reached: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.2)


pytestmark = pytest.mark.slow  # Ray takes half a minute to start


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet; afterwards it drains, and nothing of it is left."""
    model = tmp_path_factory.mktemp("model")
    write_model(model)
    with child_process(str(model), {**FLAGS, "replicas": 2}) as child:
        process = psutil.Process(child.process.pid)
        family = process.children(recursive=True)
        with (
            httpx2.Client(base_url=child.url, timeout=60) as http,
            OpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield Fleet(process, http, client)
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(60) == 0, child.log.read_text()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert "Traceback" not in child.log.read_text()


def test_conversations_without_keys_stay_where_their_contexts_are(fleet: Fleet) -> None:
    texts = {number: [f"This is conversation {number}, about {number * 7919}. " * 8] for number in range(4)}
    prompt, cached = 0, 0
    homes = dict[int, set[str]]()
    for turn in range(3):
        for number, messages in texts.items():
            answer = fleet.chat(*messages)
            assert answer.status_code == 200, answer.text
            homes.setdefault(number, set()).add(answer.headers["x-jinfercept-replica"])
            usage = answer.json()["usage"]
            if turn:
                assert answer.headers["x-jinfercept-route"] == "conversation"
                prompt += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
            messages += [answer.json()["choices"][0]["message"]["content"], "Go on."]
    assert all(len(home) == 1 for home in homes.values())
    assert len(set[str]().union(*homes.values())) == 2
    assert cached / prompt > 0.85  # the last page of 16 tokens, and the new turn, are not found


def test_ray_listens_on_this_machine_only_and_wants_its_token(fleet: Fleet) -> None:
    refused = Counter[str]()
    for process in (fleet.process, *fleet.process.children(recursive=True)):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                own = connection.laddr.ip.removeprefix("::ffff:").startswith("127.")
                assert own or "ServeReplica" in _name(process), (_name(process)[:80], connection.laddr)
                for method in METHODS:
                    refused[method] += _refuses(connection.laddr.port, method)
    assert refused[METHODS[0]] == 2  # each replica's port for its front, at every address
    assert refused[METHODS[1]] >= 2
    assert refused[METHODS[2]] == 1


def test_no_other_user_enters_the_folder_of_ray_and_of_the_stored_state(fleet: Fleet) -> None:
    files = [Path(file.path) for replica in fleet.replicas() for file in replica.open_files()]
    [state] = {path for path in files if path.name == "state.sqlite"}
    [log] = {path.parents[2] for path in files if path.suffix == ".log" and "serve" in path.parts}
    assert state.parent in log.parents
    assert is_private(state.parent)
    if os.geteuid() == 0:
        stranger = subprocess.run(["mv", state, state.with_name("moved")], user=65534, group=65534, capture_output=True)
        assert b"Permission denied" in stranger.stderr
    assert state.is_file()


def _refuses(port: int, method: str) -> bool:
    """Whether a port has a gRPC method that wants a token. Raises for one that wants none."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary(method)(b"", timeout=60)
        code: Any = refusal.value
        return code.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_killed_replica_is_an_error_by_name_and_its_stored_responses_outlive_it(fleet: Fleet) -> None:
    session = {"x-session-id": "killed"}
    body = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}
    made = fleet.http.post("/v1/responses", json=body, headers=session)
    name, stored = made.headers["x-jinfercept-replica"], f"/v1/responses/{made.json()['id']}"
    [busy] = [process for process in fleet.replicas() if _writes_log_of(process, name)]
    stream = fleet.client.completions.create(
        model="tiny",
        prompt=[1, 2, 3],
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers=session,
    )
    chunks = iter(stream)
    next(chunks)
    assert stream.response.headers["x-jinfercept-replica"] == name
    busy.kill()
    with pytest.raises(APIError) as lost:
        list(chunks)
    assert lost.value.code == "replica_lost"
    assert fleet.chat("A replica that is left answers.").status_code == 200
    _until(lambda: fleet.http.get(stored).status_code == 200, 120)
    shown = fleet.http.get(stored)
    assert shown.headers["x-jinfercept-replica"] != name
    assert shown.json()["output"] == made.json()["output"]
    follow = {"input": "Go on.", "previous_response_id": made.json()["id"], "max_output_tokens": 4}
    assert fleet.http.post("/v1/responses", json=follow).status_code == 200


def test_a_killed_replica_is_replaced(fleet: Fleet) -> None:
    killed = fleet.replicas()[0]
    killed.kill()
    _until(lambda: killed not in fleet.replicas() and len(fleet.replicas()) == 2, 120)
    _until(lambda: fleet.http.get("/health").json().get("replicas") == 2, 120)
    assert fleet.chat("And now both.").status_code == 200


def test_a_replica_that_cannot_start_is_said_in_one_line(tmp_path: Path) -> None:
    write_model(tmp_path)
    flags = ["--load-format", "dummy", "--kv-tokens", "64", "--max-model-len", "2048", "--replicas", "1", "--port", "0"]
    command = [sys.executable, "-m", "jinfercept", "serve", str(tmp_path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KV pool" in done.stderr.splitlines()[-1], done.stderr


def test_a_replica_with_several_gpus_is_one_bundle_on_one_node() -> None:
    from jinfercept.fleet.ray_application import Scale

    options = Scale(2, 2, cpus=4.0, gpus=2).options(30.0)
    assert options["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 2}
    assert options["placement_group_bundles"] == [{"CPU": 4.0, "GPU": 2}]
    assert (options["placement_group_strategy"], options["num_replicas"]) == ("STRICT_PACK", 2)
    scaling = Scale(1, 8).options(30.0)
    assert (scaling["autoscaling_config"].min_replicas, scaling["autoscaling_config"].max_replicas) == (1, 8)
    assert "placement_group_bundles" not in scaling
    assert scaling["ray_actor_options"] == {"num_cpus": 0.0}
