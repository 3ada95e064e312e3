"""`python -m tests.soak.chaos`: replicas, the front and the database of a fleet are killed at random under load.

Nothing that a client gets may be wrong, hang, or fail without a name. Tokens are compared with those of the first, quiet
answers: every prompt is greedy, and its second turn begins with a part of its first answer. Responses that a client saw stored
are fetched at the end.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import httpx2
import psutil

from benchmarks.servers import Child, child_process
from jinfercept.cli.command import run_command
from jinfercept.cli.options import Maybe, parse
from jinfercept.server.serve import reserve_files
from jinfercept.sim.reports import write_json
from tests.soak.chaos_clients import (
    PATIENCE_S,
    PROMPTS,
    TOKENS,
    ChaosClient,
    StoringClient,
    TokenClient,
    check_promises,
    prompt_of,
    request_of,
    whole,
)
from tests.soak.chaos_outcome import Kill, Outcome
from tests.soak.model import write_model
from tests.support.postgres import Postgres, postgres

PROG = "python -m tests.soak.chaos"
DESCRIPTION = "A fleet and its database are killed at random: nothing may be wrong, lost, hang or fail without a name."
_START_S = 300.0
_LOST_S = 15.0
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
_VICTIMS = {"replica": 6, "controller": 1, "front": 1, "database": 2}
"""What is killed, and how often of ten."""
_LONGEST_OUTAGE_S = 12.0
"""Of the database, more than a request waits for it."""


@final
class Fleet:
    """The command under test, which is started again when it was killed."""

    def __init__(self, model: str, replicas: int, port: int, state_url: str) -> None:
        self._model, self.replicas, self._port = model, replicas, port
        self._state_url = state_url
        self.url = f"http://127.0.0.1:{port}"
        self.up = threading.Event()
        self.family: list[psutil.Process] = []

    def child(self) -> Any:
        """The command as a context."""
        flags = {**_FLAGS, "replicas": self.replicas, "port": self._port, "state_url": self._state_url}
        return child_process(self._model, flags)

    def processes(self, child: Child, word: str) -> list[psutil.Process]:
        """Children of the command by a word of their command lines."""
        matches = list[psutil.Process]()
        for process in psutil.Process(child.process.pid).children(recursive=True):
            try:
                if word in " ".join(process.cmdline()):
                    matches.append(process)
            except psutil.Error:
                pass
        return matches

    def whole(self) -> bool:
        """Whether all replicas are healthy."""
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=10)
        except httpx2.HTTPError:
            return False
        return answer.status_code == 200 and answer.json().get("replicas") == self.replicas


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """The command."""

    seconds: float = 600.0
    """of load"""
    replicas: int = 2
    """of the fleet"""
    clients: int = 6
    """at a time; a third of them store responses"""
    every: float = 20.0
    """mean seconds from a recovery to the next kill"""
    seed: int = 0
    """of everything"""
    json: Maybe[str] = None
    """write the numbers to this file"""

    def run(self) -> int:
        """Kill and count; returns 1 if anything happened that must not."""
        reserve_files(256)
        outcome = Outcome()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            database = stack.enter_context(postgres())
            write_model(Path(folder))
            fleet = Fleet(folder, self.replicas, _free_port(), database.url)
            self._play(fleet, database, outcome)
        outcome.show()
        if self.json is not None:
            kills = [kill._asdict() for kill in outcome.kills]
            bad = {"wrong": outcome.wrong, "unnamed": outcome.unnamed, "lost": outcome.lost, "left": outcome.left}
            stored = len(outcome.promises)
            write_json(self.json, {"counts": dict(outcome.counts), "stored": stored, **bad, "kills": kills})
        return int(outcome.failed)

    def _play(self, fleet: Fleet, database: Postgres, outcome: Outcome) -> None:
        rng, began_s = Random(self.seed), 0.0
        clients: list[ChaosClient] = []
        families: list[psutil.Process] = []
        while not began_s or time.monotonic() - began_s < self.seconds:
            with fleet.child() as child:
                _wait(fleet)
                if not clients:
                    expected = _quiet_answers(fleet.url)
                    began_s = time.monotonic()
                    for number in range(self.clients):
                        seed = f"{self.seed} {number}"
                        storing = StoringClient(fleet, outcome, seed)
                        clients.append(storing if number % 3 == 2 else TokenClient(fleet, outcome, seed, expected))
                    for client in clients:
                        client.start()
                elif outcome.kills:
                    last = outcome.kills[-1]
                    outcome.kills[-1] = last._replace(recovery_s=time.monotonic() - began_s - last.at_s)
                fleet.up.set()
                self._kill(fleet, database, child, outcome, rng, began_s)
                fleet.up.clear()
                if time.monotonic() - began_s >= self.seconds:
                    self._end(fleet, clients)
                    check_promises(fleet.url, outcome)
            families += fleet.family
        _, alive = psutil.wait_procs(families, timeout=_LEFT_S)
        outcome.left += [process.name() for process in alive]

    def _kill(
        self, fleet: Fleet, database: Postgres, child: Child, outcome: Outcome, rng: Random, began_s: float
    ) -> None:
        """Kill until the front is killed, or the time is over."""
        while (at_s := time.monotonic() - began_s) < self.seconds:
            time.sleep(min(rng.expovariate(1 / self.every), max(0.0, self.seconds - at_s)))
            if time.monotonic() - began_s >= self.seconds:
                break
            what = rng.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
            fleet.family = psutil.Process(child.process.pid).children(recursive=True)
            outcome.kills.append(Kill(what, time.monotonic() - began_s, None))
            print(f"{outcome.kills[-1].at_s:6.1f} s: kill -9 {what}", file=sys.stderr, flush=True)
            if what == "front":
                fleet.up.clear()
                child.process.kill()
                child.process.wait()
                return
            if what == "database":
                outage_s = rng.uniform(0.0, _LONGEST_OUTAGE_S)
                database.kill()
                time.sleep(outage_s)
                database.start()
                recovery_s = time.monotonic() - began_s - outcome.kills[-1].at_s
                outcome.kills[-1] = outcome.kills[-1]._replace(recovery_s=recovery_s)
                continue
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

    def _end(self, fleet: Fleet, clients: Sequence[ChaosClient]) -> None:
        fleet.up.set()
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(2 * PATIENCE_S + 10)
        time.sleep(_LOST_S)  # responses of killed servers have failed by then


def _wait(fleet: Fleet) -> None:
    deadline = time.monotonic() + _START_S
    while not fleet.whole():
        assert time.monotonic() < deadline, "the fleet does not start"
        time.sleep(0.2)


def _quiet_answers(url: str) -> list[list[int]]:
    """Tokens of every prompt, before anything is killed."""
    with httpx2.Client(base_url=url, timeout=PATIENCE_S) as http:
        answers = [whole(http, request_of(prompt_of(number), TOKENS)) for number in range(PROMPTS)]
    assert all(error is None for _, error in answers), answers
    return [tokens for tokens, _ in answers]


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chaos; returns the exit status, as `jinfercept` does."""
    return run_command(parse(Chaos, PROG, DESCRIPTION, sys.argv[1:] if argv is None else argv), PROG)


if __name__ == "__main__":
    sys.exit(main())
