"""The servers that a client measures: those at given URLs, or one that is started and ended around the measurement."""

import asyncio
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console

from jinfercept.bench.openai_client import Client, Target, check_client, make_target
from jinfercept.errors import ConfigError
from jinfercept.sim.tables import check_least

_POLL_S = 0.05
_END_S = 20.0
"""Seconds that the server may take to drain after SIGTERM."""
_KEY_VARIABLE = "JINFERCEPT_API_KEY"


class Child(NamedTuple):
    """A serving child process.

    Attributes:
        url: without a version.
        process: the child; its context manager ends it.
        log: file with its output.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


@contextmanager
def child_server(model: str, flags: Mapping[str, Any]) -> Iterator[str]:
    """Starts a server as `child_process` does, and gives its URL only."""
    with child_process(model, flags) as child:
        yield child.url


@contextmanager
def child_process(model: str, flags: Mapping[str, Any]) -> Iterator[Child]:
    """Start a server, and end it on leaving.

    Args:
        model: as for `LLM`.
        flags: options of `LLM` and of the server.

    Raises:
        ConfigError: the process ends before it serves.
    """
    command = [sys.executable, "-m", "jinfercept", "serve", model, "--port", "0", *_arguments(flags)]
    environment = {name: value for name, value in os.environ.items() if name != _KEY_VARIABLE}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
            )
        try:
            with _ended_by_sigterm():
                yield Child(_wait(child, log, command), child, log)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)  # the server drains
                try:
                    child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    child.kill()
            child.wait()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process as an exception does, so that it leaves no server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    """Options of `LLM` as flags."""
    arguments = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _wait(child: "subprocess.Popen[bytes]", log: Path, command: list[str]) -> str:
    """The URL, once the server accepts connections."""
    while child.poll() is None:
        if announced := re.search(r"^jinfercept: (http\S+)$", log.read_text(errors="replace"), re.MULTILINE):
            parts = urlsplit(announced[1])
            try:
                socket.create_connection((str(parts.hostname), parts.port or 80), timeout=1.0).close()
            except OSError:
                pass
            else:
                return announced[1]
        time.sleep(_POLL_S)
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    raise ConfigError("the server did not start", got=last or "nothing said", fix=f"try {shlex.join(command)}")


class RunningServer(NamedTuple):
    """A running server, and the model that requests name."""

    target: Target
    model: str


class Servers(NamedTuple):
    """The servers to measure.

    Attributes:
        urls: of running servers, each `URL` or `NAME=URL`.
        model: that requests name; None: the first that each server lists.
        api_key: None: none is sent.
        timeout_s: seconds that a request may take.
        own: model to start `jinfercept serve` with; None: none is started.
        flags: options of the started server.
    """

    urls: Sequence[str]
    model: str | None
    api_key: str | None
    timeout_s: float
    own: str | None
    flags: Mapping[str, Any]

    def check(self) -> None:
        """Raise `ConfigError` if the options contradict each other, or if the client lacks a package."""
        check_client()
        check_least("--timeout", self.timeout_s, 0.001)
        if bool(self.urls) == (self.own is not None):
            got = "both" if self.urls else "neither"
            raise ConfigError("give either a MODEL or --base-url to measure", got=got, fix="give one of them")
        if self.urls and self.flags:
            flags = ", ".join("--" + name.replace("_", "-") for name in self.flags)
            raise ConfigError(
                "these flags need a server that the command starts itself", got=flags, fix="give MODEL, or no such flag"
            )
        names = [target.name for target in self._targets()]
        if len(set(names)) < len(names):
            raise ConfigError("two servers have the same name", got=", ".join(names), fix="give NAME=URL")

    @contextmanager
    def running(self, console: Console) -> Iterator[list[RunningServer]]:
        """All servers, while they run. Raises `ConfigError` if one does not answer."""
        if self.own is None:
            yield [self._server(target) for target in self._targets()]
            return
        with (
            console.status(f"starting jinfercept serve {self.own}") as status,
            child_server(self.own, self.flags) as url,
        ):
            status.stop()
            yield [self._server(make_target(f"jinfercept={url}", None, self.timeout_s))]

    def _targets(self) -> list[Target]:
        return [make_target(url, self.api_key, self.timeout_s) for url in self.urls]

    def _server(self, target: Target) -> RunningServer:
        async def ask() -> str:
            async with Client(target) as client:
                return await client.model(self.model)

        return RunningServer(target, asyncio.run(ask()))
