"""The stored state of a server: responses, conversations, and the events of responses in the background.

A response is committed when it begins, before a client sees its id, and when it ends, before a client sees its end. Each use of
a stored response asks the database whether it still exists, since another server may have deleted it. In the process are the
responses that it generates, and the events of those in the background.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from sqlalchemy.exc import IntegrityError

from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import Item
from jinfercept.serve.state import conversations
from jinfercept.serve.state.database import NUM_CONNECTIONS, StateDatabase, unavailable
from jinfercept.serve.state.entries import OPEN_S, Entries, OwnItems, StateEntry
from jinfercept.serve.state.tenant_pool import TenantPool

_OPEN = ("queued", "in_progress")
"""Statuses of responses that are generated."""
ANSWERED = ("completed", "incomplete")
"""Statuses of responses that a follow-up can continue."""
_LOST = {"code": "server_lost", "message": "the server that generated it has ended, or had lost the database"}
_PER_KEY, _MOST_WAITING = 3, 256
"""Transactions of one key that run, and that wait."""
_UPKEEP_S = OPEN_S / 3
_UPKEEP = "upkeep"
"""Tenant of the upkeep, which takes turns with the API keys."""
_SWEEP_S = 1.0
"""Seconds between two sweeps while much is written."""
_RETRY_S = 1.0
"""Seconds between attempts to store the end of a response in the background."""
_MOST_RUNS, _MOST_EVENT_BYTES = 4096, 2**27
"""Maximum responses whose events are kept, and bytes of these events."""

log = logging.getLogger(__name__)


class BackgroundRuns(Protocol):
    """The generation of a response in the background."""

    async def cancel(self) -> None:
        """Stop; the response is final afterwards."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from number `start` on. Raises 400 if they are not kept."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class StoredResponse:
    """A response with its input.

    Attributes:
        tenant: that sent the request.
        conversation_id: of the conversation to which it belongs.
        body_bytes: of the body of its request.
        response: in its current state; its writer changes it. Empty until its request is prepared.
        before: items of the responses that it continues, or of its conversation, if they are loaded with it.
        inputs: its own input items, after those.
        background: its generation, if that runs in the background of this process.
        finishing: stores its end; belongs to the store.
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

    @property
    def is_open(self) -> bool:
        """Whether it is not final yet."""
        return self.response["status"] in _OPEN

    @property
    def conversation(self) -> list[Item]:
        """All items of the conversation, its own output included."""
        return [*self.before, *self.inputs, *self.response["output"]]


@final
class StateStore:
    """Finds, stores and deletes what a server stores. All methods run on the event loop, their transactions in threads.

    Args:
        database: its caller closes it.
        most_background: maximum responses of one tenant in the background at a time.

    Attributes:
        open: responses that this process generates and that are stored or belong to a conversation, by id; only read elsewhere.
        events: those in the background whose events are kept, by id.
    """

    def __init__(self, database: StateDatabase, most_background: int) -> None:
        self._database, self._most_background = database, most_background
        threads = NUM_CONNECTIONS if database.outlives else 1
        self._threads = TenantPool("state", threads, min(_PER_KEY, threads), _MOST_WAITING)
        self.open: dict[str, StoredResponse] = {}
        quota = Quota(_MOST_RUNS, _MOST_EVENT_BYTES)
        self.events = ExpiringEntries[BackgroundRuns](quota, database.limits.ttl_s, time.monotonic)
        self._tasks: set[asyncio.Task[None]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._written = asyncio.Event()  # since the last sweep
        self._closed = False

    async def run[T](self, tenant: str, work: Callable[[Entries], T], num_bytes: int = 0, *, writes: bool = True) -> T:
        """The result of work in one transaction, which is committed when this returns.

        Args:
            tenant: for whom it is done; tenants take turns.
            num_bytes: approximate size of its input.
            writes: see `StateDatabase.transact`.

        Raises:
            ApiError: 503 `state_unavailable` if the database fails, or has not answered in time: then the work may be done all
                the same; 503 `state_full`; 429 if too much work of the tenant waits.
        """
        done: list[T] = []

        def transact() -> None:
            done.append(self._database.transact(work, writes=writes))

        try:
            async with asyncio.timeout(self._database.timeout_s + 1):
                await self._threads.run(tenant, num_bytes, transact)
        except TimeoutError as error:
            if not done:  # else the event loop was held up
                raise unavailable() from error
        if writes and tenant != _UPKEEP:
            self._written.set()
            self.start()
        return done[0]

    # -- found ---------------------------------------------------------------------------------------------------------

    async def holds(self, response_id: str, tenant: str) -> int:
        """Whether only this process can answer for a response of a tenant: 0 if not, 2 if it generates the response now."""
        if (stored := self.open.get(response_id)) is not None:
            return 2 * (stored.tenant == tenant)
        if self._database.outlives and self.events.peek(response_id) is None:
            return 0
        with suppress(ApiError):
            await self.find(response_id, tenant)
            return 1
        return 0

    async def find(self, response_id: str, tenant: str, *, whole: bool = False) -> StoredResponse:
        """A response of a tenant.

        Args:
            whole: whether with all responses that it continues.

        Raises:
            ApiError: 404; 400 if they are too long to load.
        """
        opened = self.open.get(response_id)
        if opened is not None and opened.tenant == tenant and opened.finishing is not None:
            await asyncio.wait((opened.finishing,), timeout=_RETRY_S)

        def read(entries: Entries) -> list[tuple[StateEntry, OwnItems]]:
            entry = entries.find(response_id, tenant)
            if entry is None or not response_id.startswith("resp_"):
                raise ApiError(404, f"no response has the id {response_id[:200]!r}", code="response_not_found")
            chain = entries.chain(response_id) if whole else [entry]
            items = entries.items_of([link.id for link in chain])
            return [(link, items[link.id]) for link in chain]

        rows = await self.run(tenant, read, writes=False)
        opened = self.open.get(response_id)
        if opened is not None and rows[0][0].is_open:
            return opened
        (entry, items), *earlier = rows
        response = entry.body | {"output": items.outputs}
        if response["status"] in _OPEN and not entry.is_open:
            response |= {"status": "failed", "error": _LOST, "completed_at": response["created_at"]}
        run = self.events.use(entry.id) if response["background"] else None
        before = [item for _, link in reversed(earlier) for item in (*link.inputs, *link.outputs)]
        return StoredResponse(entry.id, tenant, response=response, before=before, inputs=items.inputs, background=run)

    async def items(self, item_ids: Collection[str], tenant: str) -> dict[str, Item]:
        """Items of a tenant's responses and conversations by their ids, the oldest one of each id. Raises 404."""
        if not item_ids:
            return {}
        items = await self.run(tenant, lambda entries: entries.items_named(tenant, item_ids), writes=False)
        if missing := set(item_ids) - items.keys():
            opened = [stored.response for stored in self.open.values() if stored.tenant == tenant]
            outputs = [response["output"] for response in opened if response.get("store")]
            items |= {item["id"]: item for output in outputs for item in output if item["id"] in missing}
        for item_id in item_ids:
            if item_id not in items:
                raise ApiError(404, f"no item has the id {item_id[:200]!r}", param="input", code="item_not_found")
        return items

    # -- written -------------------------------------------------------------------------------------------------------

    async def begin_turn(self, stored: StoredResponse, talk: str, number: int) -> str | None:
        """Begin a response in its conversation, of which it gets the items; returns the last response of that.

        `abandon` or `begin` follows. See `conversations.begin_turn`.
        """
        self.open[stored.name] = stored
        try:
            stored.before, last = await self.run(
                stored.tenant,
                lambda entries: conversations.begin_turn(entries, stored.tenant, talk, stored.name, number),
            )
            return last
        except ApiError as error:
            if error.status_code < 500:
                del self.open[stored.name]  # nothing is written
            raise

    async def begin(self, stored: StoredResponse) -> None:
        """Commit a response that begins, if it is stored; `abandon`, or `finish` or `end`, follows.

        Raises:
            ApiError: 404 if the response that it continues is gone, 429 if too many are in the background, 503.
        """
        response, tenant = stored.response, stored.tenant
        if not response["store"]:
            return
        if response["background"]:
            self._check_background(tenant)
        self.open[stored.name] = stored
        previous = response["previous_response_id"]

        def insert(entries: Entries) -> None:
            first = -len(stored.inputs)
            try:
                entries.insert(
                    stored.name, tenant, response, stored.inputs, first=first, previous=previous, is_open=True
                )
            except IntegrityError:
                message, field_name = f"no response has the id {previous!r}", "previous_response_id"
                code = "previous_response_not_found"
                raise ApiError(404, message, param=field_name, code=code) from None

        await self.run(tenant, insert, stored.body_bytes)

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

        def undo(entries: Entries) -> None:
            if stored.conversation_id is not None:
                conversations.end_turn(entries, stored.tenant, stored.conversation_id, stored.name, ())
            entries.delete(stored.name, stored.tenant)

        async def undone() -> None:
            try:
                await self.run(stored.tenant, undo)
            finally:
                self.open.pop(stored.name, None)  # what is left is lost after its deadline

        if stored.name in self.open:
            self._begin_task(undone())

    async def finish(self, stored: StoredResponse) -> None:
        """Commit a final response, and its items to its conversation.

        Raises `ApiError`: 503 `state_unavailable`, `state_full` or `server_lost`.
        """
        self.end(stored)
        if stored.name in self.open and stored.finishing is not None:
            await asyncio.shield(stored.finishing)

    def end(self, stored: StoredResponse) -> None:
        """Commit the end of a response behind its last event, if `finish` was not called."""
        if stored.name in self.open and stored.finishing is None:
            stored.finishing = self._begin_task(self._commit(stored))

    async def delete(self, response_id: str, tenant: str) -> StoredResponse:
        """Delete a response of a tenant. Raises 404."""
        stored = await self.find(response_id, tenant)
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
            self.open.pop(stored.name, None)  # what is still open is lost after its deadline

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the end of a response is not stored: %s", error)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the upkeep, which extends deadlines and removes what has expired, unless it runs."""
        if self._upkeep is None and not self._closed:
            self._upkeep = asyncio.ensure_future(self._keep())

    async def close(self, timeout_s: float) -> None:
        """Wait until the ends of responses are committed, and end the threads."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._threads.close()

    async def _keep(self) -> None:
        while True:
            self._written.clear()
            with suppress(ApiError):  # it is logged
                while await self.run(_UPKEEP, lambda entries: entries.tend(self._open_names(), self._database.limits)):
                    pass
            await asyncio.sleep(_SWEEP_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._written.wait(), _UPKEEP_S)

    def _open_names(self) -> list[str]:
        """Ids of the responses that are generated here, and of their conversations."""
        talks = [stored.conversation_id for stored in self.open.values() if stored.conversation_id is not None]
        return [*self.open, *talks]


def _settle(entries: Entries, stored: StoredResponse) -> None:
    """Write a final response, if it is not deleted, and add its items to its conversation. Raises 503 if it is lost."""
    response, is_kept = stored.response, True
    entry = entries.find(stored.name, stored.tenant, lock=True) if response["store"] else None
    body = response | {"output": []}
    if entry is not None and not entry.is_open:
        is_kept = entry.document == encode(body)  # an earlier attempt was committed
    elif entry is not None:
        entries.update(entry, body, response["output"], is_open=False)
    if is_kept and stored.conversation_id is not None:
        items = [*stored.inputs, *response["output"]] if response["status"] in ANSWERED else []
        is_kept = conversations.end_turn(entries, stored.tenant, stored.conversation_id, stored.name, items)
    if not is_kept:
        raise ApiError(503, _LOST["message"], code=_LOST["code"])
