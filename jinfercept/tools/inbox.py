"""Calls that wait for a person. Any thread may list, answer or decline them."""

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from jinfercept.errors import RequestError
from jinfercept.tools.calls import CallFailed, CallRequest


@dataclass(frozen=True, slots=True)
class Pending:
    """A waiting call."""

    id: str  # in the inbox, not the model's
    tool: str
    arguments: dict[str, Any]
    request_id: str  # of the engine's request; "" if unknown
    tenant: str  # of the request; "" if unknown
    asked_at: float  # in seconds since 1970
    expires_at: float  # in seconds since 1970


@final
class Inbox:
    """The waiting calls, the oldest first."""

    def __init__(self) -> None:
        self.tools: frozenset[str] = frozenset()  # whose calls wait here
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Pending, Future[str]]] = {}

    def pending(self, tenant: str | None = None) -> list[Pending]:
        """List the waiting calls of one tenant; None: of all tenants."""
        with self._lock:
            return [pending for pending, _ in self._waiting.values() if tenant in (None, pending.tenant)]

    def answer(self, id: str, text: str, tenant: str | None = None) -> None:
        """Give a call its result. Raises `RequestError` if no such call of the tenant waits."""
        self._take(id, tenant).set_result(text)

    def decline(self, id: str, why: str = "", tenant: str | None = None) -> None:
        """Fail a call with a reason. Raises `RequestError` if no such call of the tenant waits."""
        self._take(id, tenant).set_exception(CallFailed("declined" + (f": {why}" if why else "")))

    async def ask(self, tool: str, request: CallRequest) -> str:
        """Wait for a person's answer. Raises `CallFailed` if the person declines. A cancelled call leaves the inbox."""
        now = time.time()
        expires_at = now + request.expires_s - time.monotonic()
        call, arguments = request.call, dict(request.arguments)
        pending = Pending(uuid.uuid4().hex[:12], tool, arguments, call.request_id, call.tenant, now, expires_at)
        answer = Future[str]()
        answer.set_running_or_notify_cancel()  # so that `set_result` always succeeds
        with self._lock:
            self._waiting[pending.id] = (pending, answer)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            with self._lock:
                self._waiting.pop(pending.id, None)

    def _take(self, id: str, tenant: str | None) -> Future[str]:
        with self._lock:
            waiting = self._waiting.get(id)
            if waiting is not None and tenant in (None, waiting[0].tenant):
                return self._waiting.pop(id)[1]
            raise RequestError(
                "no waiting call has this id",
                got=id,
                fix="GET /inbox lists those that wait; this one may be answered, or timed out",
            )
