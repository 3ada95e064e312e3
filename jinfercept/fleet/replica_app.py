"""What runs inside a replica: the whole server, called with the plain parts of a request."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from hashlib import sha256
from typing import Any, final

import anyio
from prometheus_client.metrics_core import Metric
from starlette.types import Message

from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.fleet.replicas import DETAILS, HttpCall, HttpReply, Messages, ReplicaFacts
from jinfercept.serve.app import create_app
from jinfercept.serve.http.access_log import DETAILS as LOGGED
from jinfercept.serve.observe.metrics import EngineSnapshot, collect
from jinfercept.serve.routes.response_run import BACKGROUND, BackgroundRun
from jinfercept.serve.service import Service

_MOST_MESSAGES = 256
"""Messages of a response that wait for the front; then the application waits."""
_CLOSE_S = 10.0
_FRESH_S = 0.25


def own_seed(seed: int, name: str) -> int:
    """The seed of a replica's engine, for requests that have none: equal requests draw apart on different replicas."""
    return int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "little")


@final
class ReplicaApp:
    """The server of one replica. All methods run on one event loop.

    Args:
        service: of its engine; its caller closes it.
        secret: of the fleet's keys.
    """

    def __init__(self, name: str, service: Service, secret: bytes) -> None:
        self.name, self.service = name, service
        self._secret = secret
        self._app = create_app(service)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._load = EngineSnapshot(lambda: service.llm.engine.ask(self._read_load), _FRESH_S)
        self._state = EngineSnapshot(service.llm.engine.snapshot)
        self._numbers = 0
        self._running = set[asyncio.Task[None]]()

    async def start(self) -> None:
        await self._lifespan.__aenter__()

    async def answer(self, call: HttpCall) -> AsyncGenerator[Messages]:
        yield ()
        running = _Running(self._app, call)
        task = asyncio.ensure_future(running.run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async for messages in running.messages():
                yield messages
            if running.background is not None:  # the front counts its tokens, and lets it end before a drain does
                await running.background.ended()
            yield ({"type": DETAILS, "details": running.details},)
        finally:
            running.leave()

    async def reply(self, call: HttpCall) -> HttpReply:
        answer = self.answer(call)
        head, *parts = [message async for messages in answer for message in messages]
        headers = tuple((bytes(name), bytes(value)) for name, value in head["headers"])
        return HttpReply(self.name, head["status"], headers, b"".join(part.get("body", b"") for part in parts))

    async def metrics(self) -> tuple[str, list[Metric]]:
        return self.name, collect(self.service, await self._state.look())

    async def has_call(self, name: str, tenant: str | None) -> str:
        """The name of the replica if a call of a tenant waits there; "": it does not."""
        inbox = self.service.inbox
        return self.name if inbox is not None and any(call.id == name for call in inbox.pending(tenant)) else ""

    async def facts(self) -> ReplicaFacts:
        llm, plan = self.service.llm, self.service.llm.memory_plan
        return ReplicaFacts(self._secret, llm.profile, llm.shape.buckets[-1], plan.kv_tokens + plan.host_tokens)

    async def report(self) -> dict[str, Any]:
        """The report of this replica, for routers, see `Routes`; `number` changes with every report."""
        self._numbers += 1
        service = self.service
        queue_s, _ = (await self._load.look()).seen
        accepts = not service.draining and service.llm.engine.failure is None
        full = service.llm.engine.num_waiting >= service.options.max_queue_len
        return {
            "number": self._numbers,
            "queue_s": queue_s,
            "accepts": accepts and not full,
        }

    async def demand(self) -> float:
        """Tokens of contexts that run, are paused or wait, over the tokens of the device's pool."""
        return (await self._load.look()).seen[1]

    def _read_load(self, stats: EngineStats) -> tuple[float, float]:
        """Seconds of recomputation that wait, and the demand of memory. Runs between two steps."""
        profile, chunk = self.service.llm.profile, self.service.llm.shape.buckets[-1]
        waiting = [sequence.length - min(sequence.max_computed, sequence.length) for sequence in stats.waiting.values()]
        running = [max(0, sequence.length - sequence.max_computed - 1) for sequence in stats.running.values()]
        queue_s = sum(profile.recompute_s(tokens, chunk) for tokens in (*waiting, *running) if tokens > 0)
        contexts = (*stats.running.values(), *stats.waiting.values())
        paused = [pause.sequence.length for pause in stats.interceptions.open.values() if not pause.kept]
        demanded = sum(sequence.length for sequence in contexts) + sum(paused)
        return queue_s, demanded / self.service.llm.memory_plan.kv_tokens

    async def close(self, timeout_s: float) -> None:
        await self.service.drain(timeout_s)
        if self._running:
            await asyncio.wait(list(self._running), timeout=_CLOSE_S)
        await self._lifespan.__aexit__(None, None, None)


@final
class _Running:
    """One request in the application, between its messages and a generator of them."""

    def __init__(self, app: Any, call: HttpCall) -> None:
        self._app, self._scope = app, {**call.scope, "state": {}}
        self._body: bytes | None = call.body
        self._left = asyncio.Event()
        self._sent, self._received = anyio.create_memory_object_stream[Message](_MOST_MESSAGES)

    @property
    def details(self) -> dict[str, Any]:
        return dict(self._scope.get(LOGGED, {}))

    @property
    def background(self) -> BackgroundRun | None:
        """The generation of a response in the background; None: the request has another answer."""
        return self._scope.get(BACKGROUND)

    def leave(self) -> None:
        self._left.set()
        self._received.close()

    async def run(self) -> None:
        with self._sent:
            await self._app(self._scope, self._receive, self._send)

    async def messages(self) -> AsyncGenerator[Messages]:
        async for message in self._received:
            messages = [message]
            with suppress(anyio.WouldBlock, anyio.EndOfStream):
                while True:
                    messages.append(self._received.receive_nowait())
            yield messages

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "details": self.details}
        with suppress(anyio.BrokenResourceError):  # the client has left
            await self._sent.send(message)
