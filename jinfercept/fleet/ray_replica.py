"""One replica: an actor of Ray Serve that owns an engine and its server. Imports Ray."""

import asyncio
import hashlib
import logging
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, final

from ray import serve

from jinfercept.config import EngineOptions
from jinfercept.errors import JinferceptError
from jinfercept.fleet.replica_app import ReplicaApp, own_seed
from jinfercept.fleet.replicas import HttpCall, Messages
from jinfercept.llm import LLM
from jinfercept.models.embedded import cache_directory
from jinfercept.serve.observe.log_lines import begin_logging
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.process import freeze_heap
from jinfercept.serve.serve import SWITCH_S
from jinfercept.serve.server_tools import open_server_tools
from jinfercept.serve.service import Service
from jinfercept.start.profiler import EFFORTS


class ReplicaSpec(NamedTuple):
    model: str
    engine: EngineOptions
    server: ServerOptions
    secret: bytes


@final
class EngineReplica:
    """The deployment's class. Ray Serve runs its methods on one event loop, in a thread of their own."""

    async def __init__(self, spec: ReplicaSpec) -> None:
        begin_logging(spec.server.log_format, replace=True)
        logging.getLogger("jinfercept.serve").setLevel(logging.WARNING)  # the front logs requests
        self._spec = spec
        self._ends = ExitStack()
        sys.setswitchinterval(SWITCH_S)
        name = serve.get_replica_context().replica_id.unique_id
        service = await asyncio.to_thread(self._start, name)
        app = ReplicaApp(name, service, spec.secret)
        await app.start()
        freeze_heap()
        self._app = app

    def _start(self, name: str) -> Service:
        spec = self._spec
        try:
            database = spec.server.open_state()
            tools = self._ends.enter_context(open_server_tools(spec.server.tools))
            engine = dict(spec.engine)
            with start_turn(spec.secret) as first:
                if not first and engine.get("profile") in EFFORTS:
                    del engine["profile"]  # the first replica's is remembered
                llm = self._ends.enter_context(LLM(spec.model, lazy=False, **engine))  # pyright: ignore[reportArgumentType]
                llm.restart(seed=own_seed(spec.engine.get("seed", 0), name))
                service = Service(llm, spec.model, spec.server, tools, database)
                service.check_template()
        except JinferceptError as error:
            raise RuntimeError(f"jinfercept: {error}") from None
        return service

    async def answer(self, call: HttpCall, *, ticket: Any) -> AsyncGenerator[Messages]:
        answer = self._app.answer(call)
        try:
            async for messages in answer:
                yield messages
        finally:
            await answer.aclose()

    async def ask(self, method: str, arguments: Sequence[Any], *, ticket: Any) -> Any:
        """What a method of the `ReplicaApp` returns."""
        return await getattr(self._app, method)(*arguments)

    # -- hooks of Ray Serve ----------------------------------------------------------------------------------------

    async def record_routing_stats(self) -> dict[str, Any]:
        return await self._app.report()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of the autoscaling policy: memory demanded, over the memory of the device's pool."""
        return {"memory_demand": await self._app.demand()}

    async def check_health(self) -> None:
        """Raises if the engine has failed; then Ray Serve replaces the replica."""
        failure = self._app.service.llm.engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine failed: {failure}")

    async def __del__(self) -> None:
        if hasattr(self, "_app"):
            await self._app.close(self._spec.server.drain_timeout)
        await asyncio.to_thread(self._ends.close)


@contextmanager
def start_turn(secret: bytes) -> Iterator[bool]:
    """Hold this machine's turn at starting.

    Yields whether no other replica of the fleet, which `secret` names, has started on this machine before.
    """
    try:
        import fcntl  # POSIX

        folder = cache_directory() / "fleet"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "start").open("a+")
    except (ImportError, OSError):  # read-only, or another system: all start at once
        yield True
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        name = hashlib.sha256(secret).hexdigest()
        file.seek(0)
        first = file.read() != name
        yield first
        with suppress(OSError):
            file.seek(0)
            file.truncate()
            file.write(name)
