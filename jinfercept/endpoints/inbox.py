"""Calls that wait for a person: listed, answered or declined by whoever can, from any thread."""

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from jinfercept.endpoints.calls import CallFailed, CallRequest
from jinfercept.errors import RequestError


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that waits.

    Attributes:
        id: by which it is answered.
        tool: what was called.
        arguments: as the model wrote them.
        request_id: whose call it is; "" if nobody said.
        owner: for whom it was called; "" if nobody said.
        asked_at, expires_at: in seconds since 1970.
    """

    id: str
    tool: str
    arguments: dict[str, Any]
    request_id: str
    owner: str
    asked_at: float
    expires_at: float


@final
class Inbox:
    """The calls that wait, the oldest first.

    Attributes:
        tools: names of those whose calls come here.
    """

    def __init__(self) -> None:
        self.tools: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Pending, Future[str]]] = {}

    def pending(self, owner: str | None = None) -> list[Pending]:
        """All of them, or those of one owner; fields are JSON's."""
        with self._lock:
            return [pending for pending, _ in self._waiting.values() if owner in (None, pending.owner)]

    def answer(self, id: str, text: str, owner: str | None = None) -> None:
        """Give a call its result. Raises `RequestError` if it does not wait any more, or is not the owner's."""
        self._take(id, owner).set_result(text)

    def decline(self, id: str, why: str = "", owner: str | None = None) -> None:
        """Tell a call that there will be no answer. Raises `RequestError` as `answer`."""
        self._take(id, owner).set_exception(CallFailed("declined" + (f": {why}" if why else "")))

    async def ask(self, tool: str, asked: CallRequest) -> str:
        """Wait for an answer. Raises `CallFailed` if it is declined; cancelled, the call waits no more."""
        now = time.time()
        expires_at = now + asked.expires_s - time.monotonic()
        pending = Pending(
            uuid.uuid4().hex[:12], tool, dict(asked.arguments), asked.request_id, asked.owner, now, expires_at
        )
        answer = Future[str]()
        answer.set_running_or_notify_cancel()  # whoever takes it may always set it
        with self._lock:
            self._waiting[pending.id] = (pending, answer)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            with self._lock:
                self._waiting.pop(pending.id, None)

    def _take(self, id: str, owner: str | None) -> Future[str]:
        with self._lock:
            waiting = self._waiting.get(id)
            if waiting is not None and owner in (None, waiting[0].owner):
                return self._waiting.pop(id)[1]
            raise RequestError("no call of this id waits", got=id, fix="list those that do; it may have timed out")
