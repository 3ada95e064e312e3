"""What a server process holds on to: pages and requests by its metrics; threads, files and children by the system."""

import asyncio
import re
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, final

from tests.soak.tools import MCP_SERVER

if TYPE_CHECKING:
    from httpx2 import AsyncClient

_POLL_S = 0.2
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Held(NamedTuple):
    """At one moment, while nobody asks for anything.

    Attributes:
        requests: that the engine has, kept contexts aside.
        pages: that are neither free, nor cached, nor of a kept context; or missing from the count.
        tasks: of the server's event loop.
        files: that are open; 0 where the system does not tell.
    """

    requests: int
    pages: int
    tasks: int
    threads: int
    files: int


@final
class Watch:
    """One server process.

    Args:
        http: to its URL.
        pid: of it.
    """

    def __init__(self, http: "AsyncClient", pid: int) -> None:
        import psutil

        self._http, self._process = http, psutil.Process(pid)

    async def settled(self, timeout_s: float) -> Held:
        """What it holds once that is no more than it has to be; what it still holds when the time is over."""
        until_s = time.monotonic() + timeout_s
        while True:
            holding = await self.held()
            if (not holding.requests and not holding.pages) or time.monotonic() > until_s:
                return holding
            await asyncio.sleep(_POLL_S)

    async def held(self) -> Held:
        """What it holds now."""
        text = (await self._http.get("/metrics")).raise_for_status().text
        samples: dict[str, dict[str, float]] = {}
        sizes: dict[str, str] = {}
        for name, labels, value in _SAMPLE.findall(text):
            told = dict(_LABEL.findall(labels))
            if name == "vllm:cache_config_info":
                sizes = told
            kind = told.get("residency") or told.get("state") or ""
            samples.setdefault(name, {})[kind] = float(value)
        pages, states = samples["jinfercept:pages"], samples["jinfercept:requests"]
        host = pages.pop("host") + pages.pop("host_free")
        lost = abs(int(sizes["num_gpu_blocks"]) - sum(pages.values())) + abs(int(sizes["num_cpu_blocks"]) - host)
        return Held(
            requests=int(sum(number for state, number in states.items() if state != "retained")),
            pages=int(pages["used"] + lost),
            tasks=int(samples["jinfercept:tasks"][""]),
            threads=self._process.num_threads(),
            files=self._process.num_fds() if sys.platform != "win32" else 0,
        )

    def mcp_servers(self) -> list[int]:
        """Process ids of the MCP servers that it has started."""
        import psutil

        process_ids = []
        for child in self._process.children(recursive=True):
            try:
                if MCP_SERVER in child.cmdline():
                    process_ids.append(child.pid)
            except psutil.Error:
                continue
        return process_ids
