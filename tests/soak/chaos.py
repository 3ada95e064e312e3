"""`python -m tests.soak.chaos`: replicas and the front of a fleet are killed at random under load.

Nothing that a client gets may be wrong, hang, or fail without a name. Tokens are compared with those of the first, quiet
answers: every prompt is greedy, and its second turn begins with a part of its first answer.
"""

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, final

import httpx2
import psutil
from rich.console import Console
from rich.table import Table

from jinfercept.bench.child_server import Child, child_process
from jinfercept.cli.command import run_command
from jinfercept.cli.options import Maybe, parse
from jinfercept.server.connection_limits import reserve_files
from jinfercept.sim.reports import write_json
from tests.soak.model import write_model

PROG = "python -m tests.soak.chaos"
DESCRIPTION = (
    "Replicas and the front of a fleet are killed at random: nothing may be wrong, hang or fail without a name."
)
NAMED = ("replica_lost", "no_replica", "draining", "aborted", "queue_full", "engine_error")
_PROMPTS, _TOKENS, _TURN = 24, 64, 24
_PATIENCE_S = 120.0
_START_S = 300.0
_LEFT_S = 150.0
"""Seconds in which everything of a killed command ends: Ray's agents first try to reach its head."""
_FLAGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_tokens": 8192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "swap_space": 0.001,
    "profile": "paper-gptj-6b-a100",
    "served_model_name": "tiny",
    "drain_timeout": 5,
}


class Kill(NamedTuple):
    """A process that was killed.

    Attributes:
        what: `replica`, `controller` or `front`.
        at_s: seconds after the beginning.
        recovery_s: until all replicas served again; None: they did not before the end.
    """

    what: str
    at_s: float
    recovery_s: float | None


@dataclass
class Outcome:
    """Counts of all requests; its methods are called by several threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything happened that must not."""
        return bool(self.wrong or self.unnamed or self.left or self.counts["hung"])


@final
class Fleet:
    """The command under test, which is started again when it was killed."""

    def __init__(self, model: str, replicas: int, port: int) -> None:
        self._model, self.replicas, self._port = model, replicas, port
        self.url = f"http://127.0.0.1:{port}"
        self.up = threading.Event()
        self.family: list[psutil.Process] = []

    def child(self) -> Any:
        """The command as a context."""
        return child_process(self._model, {**_FLAGS, "replicas": self.replicas, "port": self._port})

    def processes(self, child: Child, word: str) -> list[psutil.Process]:
        """Children of the command by a word of their command lines."""
        found = list[psutil.Process]()
        for process in psutil.Process(child.process.pid).children(recursive=True):
            try:
                if word in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def whole(self) -> bool:
        """Whether all replicas are healthy."""
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=10)
        except httpx2.HTTPError:
            return False
        return answer.status_code == 200 and answer.json().get("replicas") == self.replicas


@final
class Client(threading.Thread):
    """One client: it asks, one request after the other, until the end."""

    def __init__(
        self, fleet: Fleet, outcome: Outcome, expected: Sequence[Sequence[int]], lock: threading.Lock, seed: str
    ) -> None:
        super().__init__(daemon=True)
        self._fleet, self._outcome, self._expected, self._lock = fleet, outcome, expected, lock
        self._rng = Random(seed)
        self.ended = threading.Event()

    def run(self) -> None:
        with httpx2.Client(base_url=self._fleet.url, timeout=_PATIENCE_S) as http:
            while not self.ended.is_set():
                self._fleet.up.wait(1.0)
                if self._fleet.up.is_set():
                    self._ask(http)

    def _ask(self, http: httpx2.Client) -> None:
        number, second, stream = self._rng.randrange(_PROMPTS), self._rng.random() < 0.5, self._rng.random() < 0.5
        answer = self._expected[number]
        prompt, expected = [*prompt_of(number), *(answer[:_TURN] if second else ())], answer[_TURN * second :]
        body = request_of(prompt, len(expected)) | {"stream": stream}
        began_s = time.monotonic()
        try:
            tokens, error = _stream(http, body) if stream else _whole(http, body)
        except httpx2.TimeoutException:
            self._count("hung")
            return
        except httpx2.HTTPError as failure:
            if self._fleet.up.is_set() and self._settled():
                self._note("unnamed", f"{type(failure).__name__}: {failure}, stream={stream}")
            self._count("connection closed with the front")
            return
        if time.monotonic() - began_s > _PATIENCE_S:
            self._count("hung")
        if tokens != list(expected[: len(tokens)]) or (error is None and len(tokens) != len(expected)):
            self._note("wrong", f"prompt {number}, second={second}, stream={stream}: {tokens} for {expected}, {error}")
        elif error is not None and error not in NAMED:
            self._note("unnamed", error)
        self._count("answered" if error is None else error)

    def _settled(self) -> bool:
        """Whether the front still runs a moment later: it was not killed."""
        time.sleep(1.0)
        return self._fleet.up.is_set()

    def _count(self, what: str) -> None:
        with self._lock:
            self._outcome.counts[what] += 1

    def _note(self, what: str, text: str) -> None:
        with self._lock:
            getattr(self._outcome, what).append(text[:300])


def prompt_of(number: int) -> list[int]:
    """A prompt in tokens of the tiny model."""
    rng = Random(number)
    return [rng.randrange(64, 90) for _ in range(80)]


def request_of(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """The body of a greedy completion."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _whole(http: httpx2.Client, body: dict[str, Any]) -> tuple[list[int], str | None]:
    """Tokens of an answer, and the code of its error."""
    answer = http.post("/v1/completions", json=body)
    data = answer.json()
    if answer.status_code != 200:
        return [], str(data["error"]["code"])
    return data["choices"][0]["token_ids"], None


def _stream(http: httpx2.Client, body: dict[str, Any]) -> tuple[list[int], str | None]:
    tokens = list[int]()
    with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return [], str(json.loads(answer.read())["error"]["code"])
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                return tokens, str(data["error"]["code"])
            tokens += data["choices"][0].get("token_ids") or []
    return tokens, None


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """The command."""

    seconds: float = 600.0
    """of load"""
    replicas: int = 2
    """of the fleet"""
    clients: int = 6
    """at a time"""
    every: float = 20.0
    """mean seconds from a recovery to the next kill"""
    seed: int = 0
    """of everything"""
    json: Maybe[str] = None
    """write the numbers to this file"""

    def run(self) -> int:
        """Kill and count; returns 1 if anything happened that must not."""
        reserve_files(256)
        outcome, lock = Outcome(), threading.Lock()
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            fleet = Fleet(folder, self.replicas, _free_port())
            self._play(fleet, outcome, lock)
        _show(outcome)
        if self.json is not None:
            kills = [kill._asdict() for kill in outcome.kills]
            write_json(self.json, {"counts": dict(outcome.counts), "wrong": outcome.wrong, "kills": kills})
        return int(outcome.failed)

    def _play(self, fleet: Fleet, outcome: Outcome, lock: threading.Lock) -> None:
        rng, began_s = Random(self.seed), 0.0
        clients: list[Client] = []
        families: list[psutil.Process] = []
        while not began_s or time.monotonic() - began_s < self.seconds:
            with fleet.child() as child:
                _wait(fleet)
                if not clients:
                    expected = _quiet_answers(fleet.url)
                    began_s = time.monotonic()
                    seeds = (f"{self.seed} {number}" for number in range(self.clients))
                    clients = [Client(fleet, outcome, expected, lock, seed) for seed in seeds]
                    for client in clients:
                        client.start()
                elif outcome.kills:
                    last = outcome.kills[-1]
                    outcome.kills[-1] = last._replace(recovery_s=time.monotonic() - began_s - last.at_s)
                fleet.up.set()
                self._kill(fleet, child, outcome, rng, began_s)
                fleet.up.clear()
                if time.monotonic() - began_s >= self.seconds:
                    self._end(fleet, clients, child)
            families += fleet.family
        _, alive = psutil.wait_procs(families, timeout=_LEFT_S)
        outcome.left += [process.name() for process in alive]

    def _kill(self, fleet: Fleet, child: Child, outcome: Outcome, rng: Random, began_s: float) -> None:
        """Kill until the front is killed, or the time is over."""
        while (at_s := time.monotonic() - began_s) < self.seconds:
            time.sleep(min(rng.expovariate(1 / self.every), max(0.0, self.seconds - at_s)))
            if time.monotonic() - began_s >= self.seconds:
                break
            what = rng.choices(("replica", "controller", "front"), (7, 1, 2))[0]
            fleet.family = psutil.Process(child.process.pid).children(recursive=True)
            outcome.kills.append(Kill(what, time.monotonic() - began_s, None))
            print(f"{outcome.kills[-1].at_s:6.1f} s: kill -9 {what}", file=sys.stderr, flush=True)
            if what == "front":
                fleet.up.clear()
                child.process.kill()
                child.process.wait()
                return
            word = "ServeReplica" if what == "replica" else "ServeController"
            victims = fleet.processes(child, word)
            if victims:
                rng.choice(victims).kill()
            killed_s = time.monotonic()
            time.sleep(2.0)  # until the front knows it
            while not fleet.whole() and time.monotonic() - began_s < self.seconds + _START_S:
                time.sleep(0.5)
            outcome.kills[-1] = outcome.kills[-1]._replace(recovery_s=time.monotonic() - killed_s)
        fleet.family = psutil.Process(child.process.pid).children(recursive=True)

    def _end(self, fleet: Fleet, clients: Sequence[Client], child: Child) -> None:
        fleet.up.set()
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(_PATIENCE_S + 10)


def _wait(fleet: Fleet) -> None:
    deadline = time.monotonic() + _START_S
    while not fleet.whole():
        assert time.monotonic() < deadline, "the fleet does not start"
        time.sleep(0.2)


def _quiet_answers(url: str) -> list[list[int]]:
    """Tokens of every prompt, before anything is killed."""
    with httpx2.Client(base_url=url, timeout=_PATIENCE_S) as http:
        answers = [_whole(http, request_of(prompt_of(number), _TOKENS)) for number in range(_PROMPTS)]
    assert all(error is None for _, error in answers), answers
    return [tokens for tokens, _ in answers]


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _show(outcome: Outcome) -> None:
    table = Table(title="requests")
    table.add_column("outcome")
    table.add_column("number", justify="right")
    for name, number in sorted(outcome.counts.items()):
        table.add_row(name, str(number))
    for name, found in (("wrong tokens", outcome.wrong), ("errors without a name", outcome.unnamed)):
        table.add_row(name, str(len(found)))
    table.add_row("processes left", str(len(outcome.left)))
    console = Console()
    console.print(table)
    kills = Table(title="kills")
    for name in ("what", "at", "all replicas again after"):
        kills.add_column(name, justify="right")
    for kill in outcome.kills:
        kills.add_row(kill.what, f"{kill.at_s:.1f} s", "-" if kill.recovery_s is None else f"{kill.recovery_s:.1f} s")
    console.print(kills)
    for text in (*outcome.wrong[:5], *outcome.unnamed[:5], *outcome.left[:5]):
        console.print(text, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chaos; returns the exit status, as `jinfercept` does."""
    return run_command(parse(Chaos, PROG, DESCRIPTION, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
