"""A fleet without Ray: replicas in this process, which can be killed, behind a real front at a free port."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import httpx2
from openai import OpenAI

from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.replica_app import ReplicaApp
from jinfercept.fleet.replicas import HttpCall, Messages, ReplicaLostError, Replicas, Ticket
from jinfercept.fleet.routing import NoReplicaError
from jinfercept.llm import LLM
from jinfercept.server.options import ServerOptions
from jinfercept.server.serve import DrainingServer, listen
from jinfercept.server.server_tools import ServerTools
from jinfercept.server.service import Service
from tests.support.live_server import MODEL, until

SECRET = bytes(range(32))


@final
class LocalReplicas:
    """See `Replicas`.

    Attributes:
        apps: by name; those that were removed do not run any more.
        hanging: names of replicas that take requests and do nothing.
        hung: requests that these took.
        dies_after: messages of an answer after which the next replica that answers is killed; None: none.
        num_looks: calls of `holds`.
    """

    def __init__(self, apps: dict[str, ReplicaApp]) -> None:
        self.apps = apps
        self.hanging: set[str] = set()
        self.hung = 0
        self.dies_after: int | None = None
        self.num_looks = 0

    async def _app(self, ticket: Ticket) -> ReplicaApp:
        reports = {name: await app.report() for name, app in self.apps.items()}
        if not reports:
            raise NoReplicaError("no replica runs")
        name = ticket.choose(reports)
        ticket.taken(name)
        return self.apps[name]

    async def answer(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages]:
        """See `Replicas`."""
        app = await self._app(ticket)
        if app.name in self.hanging:
            self.hung += 1
            await asyncio.Event().wait()
        _, contents = ticket.__reduce__()
        answer = app.answer(call, _contents(contents))
        passed = 0
        try:
            async for messages in answer:
                if not messages:
                    yield messages
                for message in messages:
                    if self.dies_after is not None and passed >= self.dies_after:
                        self.dies_after = None
                        self.apps.pop(app.name)
                        raise ReplicaLostError(app.name)
                    passed += 1
                    yield (message,)
        finally:
            await answer.aclose()

    async def reply(self, call: HttpCall, ticket: Ticket) -> Any:
        """See `Replicas`."""
        return await (await self._app(ticket)).reply(call)

    async def metrics(self, ticket: Ticket) -> Any:
        """See `Replicas`."""
        return await (await self._app(ticket)).metrics()

    async def holds(self, kind: Any, name: str, tenant: str | None, ticket: Ticket) -> Any:
        """See `Replicas`."""
        self.num_looks += 1
        return await (await self._app(ticket)).holds(kind, name, tenant)

    async def facts(self, ticket: Ticket) -> Any:
        """See `Replicas`."""
        return (await self._app(ticket)).facts()


def _contents(arguments: Any) -> Any:
    from jinfercept.fleet.replicas import Contents

    return Contents(*arguments)


@dataclass(frozen=True)
class LocalFleet:
    """A fleet that runs.

    Attributes:
        url: of the front, without a path.
        http, client: for it.
        names: of all replicas, killed ones too.
    """

    url: str
    front: FleetFront
    replicas: LocalReplicas
    server: DrainingServer
    http: httpx2.Client
    client: OpenAI
    names: Sequence[str] = field(default=())

    def chat(self, *texts: str, **fields: Any) -> httpx2.Response:
        """A conversation whose texts alternate between a user and an assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts or ("Hi",))]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0} | fields
        return self.http.post("/v1/chat/completions", json=body)


@contextmanager
def local_fleet(
    llms: Sequence[LLM], make_tools: Callable[[], ServerTools] = ServerTools, **options: Any
) -> Iterator[LocalFleet]:
    """Serve models as replicas `a`, `b`, … of one fleet."""
    settings = ServerOptions(**({"port": 0, "served_model_name": (MODEL,), "drain_timeout": 2.0} | options))
    apps = {
        name: ReplicaApp(name, Service(llm, "tiny", settings, make_tools()), SECRET, time.monotonic)
        for name, llm in zip("abcd", llms, strict=False)
    }
    replicas = LocalReplicas(dict(apps))
    fresh = list(apps.values())

    async def connect() -> Replicas:
        await asyncio.gather(*(app.start() for app in fresh))
        fresh.clear()
        return replicas

    async def end() -> None:
        await asyncio.gather(*(app.close(0.0) for app in apps.values()))

    front = FleetFront(connect, settings, "tiny", begin_s=60.0)
    listener, url = listen(settings)
    server = DrainingServer(create_front(front, fan_out_router(front), end=end), front, listener)
    thread = threading.Thread(target=server.serve_until_signal)
    thread.start()
    until(lambda: server.started)
    key = (*settings.api_key, *settings.operator_key, "none")[0]
    headers = {"authorization": f"Bearer {key}"} if key != "none" else {}
    try:
        with (
            OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client,
            httpx2.Client(base_url=url, timeout=60, headers=headers) as http,
        ):
            yield LocalFleet(url, front, replicas, server, http, client, tuple(apps))
    finally:
        if not front.draining:
            server.handle_exit(signal.SIGTERM, None)
        thread.join()
