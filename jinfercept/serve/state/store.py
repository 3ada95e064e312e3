"""The stored state of a server: responses, conversations, and the events of responses in the background.

A response is committed when it ends, before a client sees its end. One in the background is also committed when it begins, as
failed: so it is found if this process ends before it does. Each use of a stored response asks the database whether it still
exists, since another server may have deleted it. In the process are the responses that it generates, and the events of those in
the background.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError

from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.serve.access.key_limits import TenantPool
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import Item
from jinfercept.serve.state.database import NUM_CONNECTIONS, StateDatabase, unavailable
from jinfercept.serve.state.entries import Entries, OwnItems, begin_turn, end_turn

_OPEN = ("queued", "in_progress")
"""Statuses of responses that are generated."""
ANSWERED = ("completed", "incomplete")
"""Statuses of responses that a follow-up can continue."""
_LOST = {
    "code": "server_lost",
    "message": "the server that generated it has ended before it, or another server still does",
}
"""The error of a response in the background, until the server that generates it commits its end."""
_PER_KEY, _MOST_WAITING = 3, 256
"""Transactions of one key that run, and that wait."""
_UPKEEP = "upkeep"
"""Tenant of the upkeep, which takes turns with the API keys."""
_SWEEP_S = 1.0
"""Seconds between two sweeps while much is written."""
_RETRY_S = 1.0
"""Seconds between attempts to store the end of a response in the background."""
_MOST_RUNS, _MOST_EVENT_BYTES = 4096, 2**27
"""Maximum responses whose events are kept, and bytes of these events."""
_MOST_LAST, _MOST_LAST_BYTES = 16384, 2**28
"""Maximum responses that WebSockets may continue though they are not stored, and bytes of their conversations, about."""
_LAST_S = 3600.0
_MOST_KEPT = 16
"""Responses of one WebSocket that are kept though they are not stored."""
_READ = ("conversation", "output", "status", "usage")
"""Fields of a response that one that continues it reads: others have what its client sent, of any size."""
_ITEM_BYTES, _TOKEN_BYTES = 1024, 4

log = logging.getLogger(__name__)


class BackgroundRuns(Protocol):
    """The generation of a response in the background."""

    async def cancel(self) -> None:
        """Stop; the response is final afterwards."""
        ...

    async def ended(self) -> None:
        """Return when the response has ended."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from number `start` on. Raises 400 if they are not kept."""
        ...


@final
class SocketMemory:
    """The newest responses that were created over one WebSocket and are not stored, for requests that continue them there.

    `last` keeps those of all WebSockets.
    """

    def __init__(self, last: "ExpiringEntries[StoredResponse]") -> None:
        self._last = last
        self._names: list[str] = []

    def keep(self, stored: "StoredResponse") -> None:
        """Keep a final response, and not the oldest one any longer if there are many."""
        read = {name: stored.response[name] for name in _READ}
        self._last.put(stored.tenant, stored.name, replace(stored, response=read, memory=None), stored.num_bytes)
        self._names.append(stored.name)
        if len(self._names) > _MOST_KEPT:
            self._last.remove(self._names.pop(0))

    def find(self, response_id: str) -> "StoredResponse | None":
        return self._last.use(response_id) if response_id in self._names else None

    def close(self) -> None:
        for name in self._names:
            self._last.remove(name)


@dataclass(eq=False, repr=False, slots=True)
class StoredResponse:
    """A response with its input.

    Attributes:
        body_bytes: of the body of its request, and of those that it continues at a WebSocket.
        response: in its current state; its writer changes it. Empty until its request is prepared.
        before: items of the responses that it continues, or of its conversation, if they are loaded with it.
        inputs: its own input items, after those.
        background: its generation, if that runs in the background of this process.
        finishing: stores its end; belongs to the store.
        memory: of the WebSocket over which it is created.
    """

    name: str
    tenant: str
    conversation_id: str | None = None
    body_bytes: int = 0
    response: dict[str, Any] = field(default_factory=dict[str, Any])
    before: Sequence[Item] = ()
    inputs: Sequence[Item] = ()
    background: BackgroundRuns | None = None
    finishing: asyncio.Task[None] | None = None
    is_deleted: bool = False
    memory: SocketMemory | None = None

    @property
    def is_open(self) -> bool:
        return self.response["status"] in _OPEN

    @property
    def conversation(self) -> list[Item]:
        return [*self.before, *self.inputs, *self.response["output"]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the conversation, about."""
        usage = self.response["usage"]
        tokens = _TOKEN_BYTES * usage["total_tokens"] if usage else 0
        return _ITEM_BYTES * len(self.conversation) + tokens + self.body_bytes


@final
class StateStore:
    """Finds, stores and deletes what a server stores. All methods run on the event loop, their transactions in threads.

    Args:
        database: its caller closes it.
        most_background: maximum responses of one tenant in the background at a time.

    Attributes:
        open: responses that this process generates and that are stored or belong to a conversation, by id.
        events: those in the background whose events are kept, by id.
        last: those that WebSockets keep, by id.
    """

    def __init__(self, database: StateDatabase, most_background: int) -> None:
        self._database, self._most_background = database, most_background
        threads = NUM_CONNECTIONS if database.outlives else 1
        self._threads = TenantPool("state", threads, min(_PER_KEY, threads), _MOST_WAITING)
        self.open: dict[str, StoredResponse] = {}
        quota = Quota[str](_MOST_RUNS, _MOST_EVENT_BYTES)
        self.events = ExpiringEntries[BackgroundRuns](quota, database.limits.ttl_s, time.monotonic)
        lasts = Quota[str](_MOST_LAST, _MOST_LAST_BYTES)
        self.last = ExpiringEntries[StoredResponse](lasts, _LAST_S, time.monotonic)
        self._finishing: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None  # that has not begun
        self._closed = False

    async def run[T](self, tenant: str, work: Callable[[Entries], T], num_bytes: int = 0, *, writes: bool = True) -> T:
        """The result of work in one transaction, which is committed when this returns. Tenants take turns.

        Args:
            num_bytes: approximate size of its input.
            writes: see `StateDatabase.transact`.

        Raises:
            ApiError: 503 `state_unavailable` if the database fails, or has not answered in time: then the work may be done all
                the same; 503 `state_full`; 429 if too much work of the tenant waits.
        """
        try:
            async with asyncio.timeout(self._database.timeout_s + 1):
                result = await self._threads.run(
                    tenant, num_bytes, lambda: self._database.transact(work, writes=writes)
                )
        except TimeoutError as error:
            raise unavailable() from error
        if writes and tenant != _UPKEEP:
            self._sweeping = self._sweeping or asyncio.ensure_future(self._sweep())
        return result

    # -- found ---------------------------------------------------------------------------------------------------------

    async def find(self, response_id: str, tenant: str, *, whole: bool = False) -> StoredResponse:
        """A response of a tenant, with `whole` together with the items of all responses that it continues.

        Raises:
            ApiError: 404; 400 if they are too long to load.
        """
        opened = self.open.get(response_id)
        if opened is not None and opened.tenant == tenant and opened.response.get("store"):
            if opened.finishing is not None:
                await asyncio.wait((opened.finishing,), timeout=_RETRY_S)
            if self.open.get(response_id) is opened:
                return opened

        def read(entries: Entries) -> list[tuple[Row[Any], OwnItems]]:
            entry = entries.find(response_id, tenant)
            if entry is None or not response_id.startswith("resp_"):
                raise ApiError(404, f"no response has the id {response_id[:200]!r}", code="response_not_found")
            chain = entries.chain(response_id) if whole else [entry]
            items = entries.items_of([link.id for link in chain])
            return [(link, items[link.id]) for link in chain]

        (entry, own), *earlier = await self.run(tenant, read, writes=False)
        response = json.loads(entry.document) | {"output": own.outputs}
        before = [item for _, items in reversed(earlier) for item in (*items.inputs, *items.outputs)]
        run = self.events.use(entry.id) if response["background"] else None
        return StoredResponse(entry.id, tenant, response=response, before=before, inputs=own.inputs, background=run)

    async def items(self, item_ids: Collection[str], tenant: str) -> dict[str, Item]:
        """Items of a tenant's responses and conversations by their ids, the oldest one of each id. Raises 404."""
        if not item_ids:
            return {}
        items = await self.run(tenant, lambda entries: entries.items_named(tenant, item_ids), writes=False)
        if missing := set(item_ids) - items.keys():
            mine = [stored for stored in self.open.values() if stored.tenant == tenant and stored.response.get("store")]
            parts = [(*stored.inputs, *stored.response["output"]) for stored in mine]
            items |= {item["id"]: item for part in parts for item in part if item["id"] in missing}
        for item_id in item_ids:
            if item_id not in items:
                raise ApiError(404, f"no item has the id {item_id[:200]!r}", param="input", code="item_not_found")
        return items

    # -- generated -----------------------------------------------------------------------------------------------------

    def check_unlocked(self, conversation_id: str, tenant: str) -> None:
        """Raise 409 while a response is generated in a conversation of a tenant. OpenAI's clients retry after it."""
        if any(stored.conversation_id == conversation_id and stored.tenant == tenant for stored in self.open.values()):
            message = "another response is being generated in this conversation; fix: retry when it has ended"
            retry = {"Retry-After": "1"}
            raise ApiError(409, message, param="conversation", code="conversation_locked", headers=retry)

    async def begin_turn(self, stored: StoredResponse, talk: str, number: int) -> str | None:
        """Begin a response in its conversation, of which it gets the items; returns the last response of that.

        No other one begins there before it ends. `abandon` or `begin` follows.
        """
        self.check_unlocked(talk, stored.tenant)
        self.open[stored.name] = stored
        stored.before, last = await self.run(
            stored.tenant, lambda entries: begin_turn(entries, stored.tenant, talk, number), writes=False
        )
        return last

    async def begin(self, stored: StoredResponse) -> None:
        """Count a response as begun, if it is stored; commit one in the background. `abandon`, `finish` or `end` follows.

        Raises:
            ApiError: 429 if too many are in the background; 503 or 404 as `finish` does.
        """
        if stored.response["background"]:
            self._check_background(stored.tenant)
        if stored.response["store"]:
            self.open[stored.name] = stored
        if stored.response["background"] and self._database.outlives:
            lost = {**stored.response, "status": "failed", "error": _LOST}
            await self.run(stored.tenant, lambda entries: _insert(entries, stored, lost), stored.body_bytes)

    def _check_background(self, tenant: str) -> None:
        of_tenant = [stored for stored in self.open.values() if stored.tenant == tenant]
        running = sum(bool(stored.response.get("background")) for stored in of_tenant)
        if running >= self._most_background:
            most = self._most_background
            raise ApiError(
                429,
                f"an API key may have {most} responses in the background; this one has {running}; fix: wait for one to end",
                param="background",
                code="too_many_background_responses",
                headers={"Retry-After": "1"},
            )

    def abandon(self, stored: StoredResponse) -> None:
        """Undo `begin_turn` and `begin` for a response that is not generated."""
        if self.open.pop(stored.name, None) is not None and stored.response.get("background"):
            self._at_close(self.run(stored.tenant, lambda entries: entries.delete(stored.name, stored.tenant)))

    async def finish(self, stored: StoredResponse) -> None:
        """Commit a final response, and its items to its conversation; one that is not stored is kept by its WebSocket.

        Raises:
            ApiError: 503 `state_unavailable` or `state_full`; 404 if the response that it continues is gone.
        """
        if stored.memory is not None and not stored.response["store"] and stored.response["status"] in ANSWERED:
            stored.memory.keep(stored)
        self.end(stored)
        if stored.name in self.open and stored.finishing is not None:
            await asyncio.shield(stored.finishing)

    def end(self, stored: StoredResponse) -> None:
        """Commit the end of a response behind its last event, if `finish` was not called."""
        if stored.name in self.open and stored.finishing is None:
            stored.finishing = self._at_close(self._commit(stored))

    def _at_close(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(_note_failure)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return task

    async def delete(self, response_id: str, tenant: str) -> StoredResponse:
        """Delete a response of a tenant. Raises 404."""
        stored = await self.find(response_id, tenant)
        stored.is_deleted = True
        await self.run(tenant, lambda entries: entries.delete(response_id, tenant))
        self.events.remove(response_id)
        return stored

    async def _commit(self, stored: StoredResponse) -> None:
        try:
            while True:
                try:
                    await self.run(stored.tenant, lambda entries: _settle(entries, stored), stored.body_bytes)
                    return
                except ApiError as error:
                    if error.code != "state_unavailable" or stored.background is None or self._closed:
                        raise
                await asyncio.sleep(_RETRY_S)
        finally:
            self.open.pop(stored.name, None)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> None:
        """Wait until the ends of responses are committed, and end the threads."""
        self._closed = True
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=timeout_s)
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._threads.close()

    async def _sweep(self) -> None:
        """Remove what expires, and what is beyond the limits; once for all that is written within a second."""
        await asyncio.sleep(_SWEEP_S)
        self._sweeping = None
        with suppress(ApiError):  # it is logged
            while await self.run(_UPKEEP, lambda entries: entries.sweep(self._database.limits)):
                pass


def _note_failure(finishing: asyncio.Task[None]) -> None:
    if not finishing.cancelled() and (error := finishing.exception()) is not None:
        log.warning("the end of a response is not stored: %s", error)


def _settle(entries: Entries, stored: StoredResponse) -> None:
    """Write a final response, unless it is deleted or an earlier attempt has written it; its items to its conversation too."""
    response = stored.response
    if response["store"] and not stored.is_deleted:
        entry = entries.find(stored.name, stored.tenant)
        if entry is None:
            _insert(entries, stored, response, response["output"])
        elif json.loads(entry.document)["error"] == _LOST:
            entries.update(entry, response | {"output": []}, response["output"])
    if stored.conversation_id is not None and response["status"] in ANSWERED:
        items = [*stored.inputs, *response["output"]]
        end_turn(entries, stored.tenant, stored.conversation_id, stored.name, items)


def _insert(entries: Entries, stored: StoredResponse, response: Mapping[str, Any], output: Sequence[Item] = ()) -> None:
    """Insert a response with its own items. Raises 404 if the response that it continues is gone."""
    body, previous = {**response, "output": []}, response["previous_response_id"]
    items, first = [*stored.inputs, *output], -len(stored.inputs)
    try:
        entries.insert(stored.name, stored.tenant, body, items, first=first, previous=previous)
    except IntegrityError:
        message, field_name = f"no response has the id {previous!r}", "previous_response_id"
        raise ApiError(404, message, param=field_name, code="previous_response_not_found") from None
