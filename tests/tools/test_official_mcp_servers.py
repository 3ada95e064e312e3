"""Servers of the official SDKs, old ones with sessions and new ones without: their tools run, change, and outlive a restart."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fetched_packages import npm_packages, python_packages
from tests.support.tool_runner import tool_runner, until

SERVERS = Path(__file__).parents[1] / "support" / "mcp_servers"
NPM = (
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/server@2.4.0",
    "@modelcontextprotocol/node@2.1.2",
    "zod@4.6.7",
)


def python_1(*words: str) -> tuple[list[str], dict[str, str]]:
    """The command of a server without its port, which comes first, and its environment."""
    return [sys.executable, str(SERVERS / "python_1.py"), *words], {"PYTHONPATH": str(python_packages("mcp==1.30.0"))}


def python_2() -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(SERVERS.parent / "mcp_shop.py")], {}


def typescript(program: str) -> tuple[list[str], dict[str, str]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    return [node, str(SERVERS / program), str(npm_packages(*NPM) / "node_modules")], {}


KINDS = {
    "python 1": lambda: python_1(),
    "python 1, stateless": lambda: python_1("stateless"),
    "python 1, json": lambda: python_1("json"),
    "python 2": python_2,
    "typescript 1": lambda: typescript("typescript_1.mjs"),
    "typescript 2": lambda: typescript("typescript_2.mjs"),
}
TELL_CHANGES = ("python 1", "python 1, json", "typescript 1")
"""Servers that tell their clients of a new tool."""


class Server:
    """A server in a process of its own, at one port for all its lives."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        at = 2 if command[0] == sys.executable else 3
        self._command = [*command[:at], str(self.port), *command[at:]]
        self._environment = {"PATH": os.environ["PATH"], "SHOP": "Anna"} | environment
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self._command, env=self._environment, stdout=quiet, stderr=quiet)
        until(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_tools_of_a_server_run_change_and_outlive_a_restart(kind: str, tmp_path: Path) -> None:
    server = Server(*KINDS[kind]())
    toml = f'[[tool]]\nkind = "mcp"\nname = "shop"\nurl = "http://127.0.0.1:{server.port}/mcp"\ntimeout_s = 60\n'
    try:
        with tool_runner(tmp_path, toml) as runner:
            names = [tool.name for tool in runner.loaded.tools]
            assert "price" in names
            assert "lamp: " in runner.ask("price", item="lamp").text
            refused = runner.ask("price", item="moon")
            assert (refused.status, refused.text[-24:]) == ("error", "the moon is not for sale")
            if kind in TELL_CHANGES:
                assert runner.ask("learn").text == "learnt"
                until(lambda: [tool.name for tool in runner.loaded.tools] == [*names, "fly"])
                assert runner.ask("fly").text == "fly!"
            server.stop()
            server.start()
            until(lambda: "lamp: " in runner.ask("price", item="lamp").text)
            assert [tool.name for tool in runner.loaded.tools] == names
    finally:
        server.stop()
