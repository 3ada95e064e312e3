"""A PostgreSQL of its own for tests, at a free port, in a folder that is removed afterwards."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import psutil
import pytest

_PASSWORD = "secret-word"


def _programs() -> Path:
    """The folder of PostgreSQL's programs. Skips the test where there is none."""
    folders = [
        *Path("/usr/lib/postgresql").glob("*/bin"),
        *([Path(which).parent] if (which := shutil.which("initdb")) else []),
    ]
    usable = [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]
    if not usable:
        pytest.skip("no PostgreSQL: neither in /usr/lib/postgresql nor initdb in the path (apt-get install postgresql)")
    return usable[-1]


@final
class Postgres:
    """A database server.

    Attributes:
        url: of its database, with a password.
    """

    def __init__(self, folder: Path) -> None:
        self._programs, self._folder = _programs(), folder
        self._user: dict[str, Any] = {"user": "postgres"} if os.geteuid() == 0 else {}  # it refuses to run as root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"postgresql+psycopg://tester:{_PASSWORD}@127.0.0.1:{self._port}/postgres?connect_timeout=2"
        if self._user:
            shutil.chown(folder, "postgres")
        (folder / "password").write_text(_PASSWORD)
        (folder / "password").chmod(0o644)
        made = ["-D", folder / "data", "-U", "tester", "--auth", "scram-sha-256", "--pwfile", folder / "password"]
        self._run("initdb", *made, "--no-sync", "--no-locale", "--encoding", "UTF8")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {"port": self._port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        data = self._folder / "data"
        self._run("pg_ctl", "-D", data, "-o", options, "-l", self._folder / "log", "-w", "-t", "30", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; "immediate" is a crash."""
        self._run("pg_ctl", "-D", self._folder / "data", "-m", mode, "-w", "stop")

    def kill(self) -> None:
        """End all its processes with SIGKILL, as a machine without memory does, and wait until they are gone."""
        postmaster = psutil.Process(self._postmaster())
        processes = [postmaster, *postmaster.children(recursive=True)]
        self._signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=60)

    def pause(self) -> None:
        """Have it answer nothing, with all its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it answer again."""
        self._signal(signal.SIGCONT)

    def _postmaster(self) -> int:
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def _signal(self, number: int) -> None:
        first = self._postmaster()
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for process in (first, *map(int, children)):
            os.kill(process, number)

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        with (self._folder / "output").open("ab") as output:  # a server keeps its output open
            subprocess.run(command, check=True, stdout=output, stderr=output, cwd=self._folder, **self._user)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A new server, stopped and removed afterwards."""
    _programs()
    folder = Path(tempfile.mkdtemp(prefix="jinfercept-pg-"))
    try:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
