"""Servers in processes of their own, started and ended around a measurement or a test."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jinfercept.errors import ConfigError

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
