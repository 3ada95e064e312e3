"""Several processes serve one model: the tokens are those of one process, and all end when one is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.draft_checkpoint import DRAFTS, with_assistant, with_draft_layer
from tests.support.fake_engine import POLICIES
from tests.support.host_process import SIZES, WORKLOAD
from tests.support.hosts import free_port
from tests.support.tiny_model import streams, tiny_llm

ROOT = Path(__file__).parents[3]
END_S = 60.0
"""Seconds within which all hosts end when one is lost."""


class Hosts:
    """The processes of a group, and what host 0 prints."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def lines(self) -> Iterator[dict[str, Any]]:
        """What host 0 prints as JSON; Gloo writes lines of its own."""
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def ends(self, timeout_s: float) -> list[tuple[int, str]]:
        """The exit status of every process, and its standard error. Fails if one has not ended in time."""
        deadline = time.monotonic() + timeout_s
        return [(process.wait(max(0.0, deadline - time.monotonic())), _errors(process)) for process in self.processes]


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16", "PYTHONPATH": str(ROOT)}


@contextmanager
def running(commands: Sequence[Sequence[str]]) -> Iterator[Hosts]:
    """A process for each command, killed at the end."""
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        yield Hosts(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def started(num_hosts: int, then: str, *, num_devices: int = 1, **options: Any) -> Iterator[Hosts]:
    """Processes of `host_process.py`."""
    options = {"name": "llama_gqa", "policies": ["swap"], "profile": "paper-gptj-6b-a100"} | options
    options |= {"coordinator": f"127.0.0.1:{free_port()}", "num_hosts": num_hosts, "host_timeout": 60.0}
    program = [sys.executable, "-m", "tests.support.host_process", str(num_devices), then]
    with running([[*program, json.dumps(options | {"host_id": host_id})] for host_id in range(num_hosts)]) as hosts:
        yield hosts


def commands(num_hosts: int, *flags: str) -> list[list[str]]:
    """`jinfercept serve` on every host."""
    at = f"--coordinator=127.0.0.1:{free_port()} --num-hosts={num_hosts} --host-timeout=60 --port=0".split()
    served = [
        "serve",
        "tests/golden/llama_gqa",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "4",
    ]
    program = [sys.executable, "-m", "jinfercept", *served, "--kv-tokens", "256", *at, *flags]
    return [[*program, f"--host-id={host_id}"] for host_id in range(num_hosts)]


def alone(name: str, policies: Sequence[str]) -> list[list[list[int]]]:
    """The tokens of one process, by policy."""
    with tiny_llm(name, **SIZES) as llm:
        served = []
        for policy in policies:
            llm.restart(policy=policy)
            served.append(streams(WORKLOAD.run(llm)))
    return served


def _errors(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def test_two_hosts_serve_the_tokens_of_one_and_end_when_one_is_killed() -> None:
    with started(2, "serve") as hosts:
        (expected,) = alone("llama_gqa", ["swap"])
        lines = hosts.lines()
        first = next(lines)
        assert first["streams"] == expected
        assert first["moved"] > 0
        assert first["compiled"] == 0
        next(lines)
        hosts.processes[1].kill()
        (status, errors), _ = hosts.ends(END_S)
    assert status == 1
    assert "jinfercept: host 1 was lost" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_hosts", "num_devices"),
    [
        *[("llama_gqa", 2, 2), ("llama_gqa", 4, 1), ("qwen3", 2, 2), ("qwen3", 4, 1)],
        ("gptj", 2, 1),  # it has two heads
    ],
)
def test_hosts_serve_the_tokens_of_one_process_and_end_in_order(name: str, num_hosts: int, num_devices: int) -> None:
    with started(num_hosts, "end", num_devices=num_devices, name=name, policies=list(POLICIES)) as hosts:
        expected = alone(name, list(POLICIES))
        lines = list(hosts.lines())
        ends = hosts.ends(END_S)
    assert [line["streams"] for line in lines] == expected
    assert sum(line["compiled"] for line in lines) == 0
    assert [status for status, _ in ends] == [0] * num_hosts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layer", "assistant"])
def test_drafts_on_several_hosts_leave_the_tokens_as_they_are(kind: str, tmp_path: Path) -> None:
    """Drafts of a layer of the model, whose recurrent layers have states, and of an assistant."""
    if kind == "layer":
        name, drafts = with_draft_layer("qwen3_next", tmp_path / "model", agrees=True), DRAFTS
    else:
        name, assistant = with_assistant(tmp_path)
        drafts = DRAFTS | {"model": str(assistant)}
    options: dict[str, Any] = {"profile": "roofline-llama-13b-a100", "pipeline_depth": 0}
    with started(2, "end", name=str(name), speculative_config=drafts, **options) as hosts:
        expected = alone(str(name), ["swap"])
        lines = list(hosts.lines())
        ends = hosts.ends(END_S)
    assert [line["streams"] for line in lines] == expected
    assert lines[0]["accepted"] > 10
    assert lines[0]["compiled"] == 0
    assert [status for status, _ in ends] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_four_hosts_end_when_one_is_lost(victim: int, number: signal.Signals) -> None:
    with started(4, "serve") as hosts:
        lines = hosts.lines()
        for _ in range(2):
            next(lines)
        hosts.processes[victim].send_signal(number)
        left = Hosts([process for process in hosts.processes if process is not hosts.processes[victim]])
        for status, errors in left.ends(END_S):
            assert status != 0
            if victim == 0 and status < 0:  # JAX's own client may see its coordinator's end first
                assert "JAX distributed service detected fatal errors" in errors
            else:
                assert f"jinfercept: host {victim} was lost" in errors


@pytest.mark.slow
def test_a_server_of_two_hosts_answers_and_drains() -> None:
    with running(commands(2)) as hosts:
        stdout = hosts.processes[0].stdout
        assert stdout is not None
        url = next(line for line in stdout if line.startswith("jinfercept: http")).split()[1]
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
        assert len(answer.json()["choices"][0]["token_ids"]) == 8
        hosts.processes[1].send_signal(signal.SIGTERM)  # it waits for host 0
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"] == answer.json()["choices"]
        hosts.processes[0].send_signal(signal.SIGTERM)
        assert [status for status, _ in hosts.ends(END_S)] == [0, 0]


@pytest.mark.slow
def test_a_host_that_cannot_start_ends_the_others_with_its_reason() -> None:
    with running(commands(2, "--tensor-parallel-size=3")) as hosts:
        for status, errors in hosts.ends(60):
            assert status == 1
            assert "every host must give the same number of devices; got tensor_parallel_size=3" in errors
