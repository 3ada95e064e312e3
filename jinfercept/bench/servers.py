"""The servers that a client measures: those at given URLs, or one that is started and ended around the measurement."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console

from jinfercept.bench.child_server import child_server
from jinfercept.bench.openai_client import Client, Target, check_client, make_target
from jinfercept.errors import ConfigError
from jinfercept.sim.tables import check_least


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
            raise ConfigError("what is measured is a MODEL or a --base-url", got=got, fix="give one of them")
        if self.urls and self.flags:
            flags = ", ".join("--" + name.replace("_", "-") for name in self.flags)
            raise ConfigError(
                "these are of a server that is started here", got=flags, fix="give MODEL, or no such flag"
            )
        names = [target.name for target in self._targets()]
        if len(set(names)) < len(names):
            raise ConfigError("servers of one name cannot be told apart", got=", ".join(names), fix="give NAME=URL")

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
