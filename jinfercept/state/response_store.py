"""The stored responses, in the database of the stored state: SQLite in memory, a file of SQLite, or PostgreSQL.

A response is committed when it begins, before a client sees its id, and when it ends, before a client sees its end.
Each use of a stored response asks the database whether it still exists, since another server may have deleted it. In the
process are the responses that it generates, and the events of those in the background.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from sqlalchemy.orm import Session

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item
from jinfercept.state import conversation_rows, response_rows
from jinfercept.state.background_events import BackgroundEvents
from jinfercept.state.conversation_rows import ConversationTurn
from jinfercept.state.database import FULL, StateDatabase
from jinfercept.state.queries import ServerClock, check_loaded
from jinfercept.state.response_rows import LOST, ResponseDocuments, ResponseHead
from jinfercept.state.stored_response import RemoteRun, StoredResponse
from jinfercept.state.upkeep import Heartbeat

_RETRY_S = 1.0
"""Seconds between attempts to store the end of a response in the background."""
_ANSWERED = ("completed", "incomplete")

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _OpenResponse:
    """A response that this process generates, until its end is committed.

    Attributes:
        stored: the response; None until its request is prepared.
        begun_bytes: of its row's document.
        is_inserted: whether it has a row.
    """

    tenant: str
    stored: StoredResponse | None = None
    conversation_id: str | None = None
    begun_bytes: int = 0
    is_inserted: bool = False
    finishing: asyncio.Task[None] | None = None


@final
class ResponseStore:
    """Finds, stores and deletes responses. All methods run on the event loop.

    Args:
        database: of responses and conversations.
        server: this server.
        ttl_s: seconds until a response expires.
        most_background: maximum responses of one tenant in the background at a time.
        poll_s: seconds between two looks at a response that another server generates.

    Attributes:
        open: responses that this process generates, by id; only read elsewhere.
        background: those in the background, with their events.
    """

    def __init__(
        self, database: StateDatabase, server: ServerClock, *, ttl_s: float, most_background: int, poll_s: float
    ) -> None:
        self._database, self._server = database, server
        self._ttl_s, self._most_background, self.poll_s = ttl_s, most_background, poll_s
        self.open: dict[str, _OpenResponse] = {}
        self.background = BackgroundEvents(ttl_s, self.open.__contains__)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # -- found ---------------------------------------------------------------------------------------------------------

    async def holds(self, response_id: str, tenant: str) -> int:
        """Whether only this process can answer for a response of a tenant: 0 if not, 2 if it generates the response now."""
        if (generated := self.open.get(response_id)) is not None:
            return 2 * (generated.tenant == tenant)
        if self._database.outlives:
            run = self.background.get(response_id)
            return int(run is not None and run.tenant == tenant)
        with suppress(ApiError):
            return int((await self._head(response_id, tenant)).status != "")
        return 0

    async def find(self, response_id: str, tenant: str) -> StoredResponse:
        """A response of a tenant. Those that it continues are known only if this process generates it. Raises 404."""
        return await self._read(response_id, tenant, whole=False)

    async def load(self, response_id: str, tenant: str) -> StoredResponse:
        """A response of a tenant with all that it continues. Raises 404; 400 if they are too long to load."""
        return await self._read(response_id, tenant, whole=True)

    async def items(self, item_ids: Collection[str], tenant: str) -> dict[str, Item]:
        """Items of a tenant's responses and conversations by their ids, the oldest one of each id. Raises 404."""
        items = await self._database.run(
            tenant, lambda session: response_rows.read_items(session, tenant, item_ids), only_reads=True
        )
        if missing := set(item_ids) - items.keys():
            inserted = [run.stored for run in self.open.values() if run.tenant == tenant and run.is_inserted]
            outputs = [stored.response["output"] for stored in inserted if stored is not None]
            items |= {item["id"]: item for output in outputs for item in output if item["id"] in missing}
        for item_id in item_ids:
            if item_id not in items:
                raise ApiError(404, f"no item has the id {item_id[:200]!r}", param="input", code="item_not_found")
        return items

    async def _head(self, response_id: str, tenant: str) -> ResponseHead:
        generated = self.open.get(response_id)
        if generated is not None and generated.tenant == tenant and generated.finishing is not None:
            await asyncio.wait((generated.finishing,), timeout=_RETRY_S)

        def read(session: Session) -> ResponseHead | None:
            return response_rows.read_head(session, self._server, response_id, tenant)

        head = await self._database.run(tenant, read, only_reads=True)
        if head is not None and head.is_open and not head.is_live and head.server_id != self._server.server_id:

            def fail(session: Session) -> ResponseHead | None:
                response_rows.fail_if_lost(session, self._server, response_id)
                return read(session)

            head = await self._database.run(tenant, fail, frees=True)
        if head is None:
            run = self.background.get(response_id)
            if run is not None and run.tenant == tenant:
                self.background.forget(response_id)
            raise no_response(response_id)
        return head

    async def _read(self, response_id: str, tenant: str, *, whole: bool) -> StoredResponse:
        head = await self._head(response_id, tenant)
        generated = self.open.get(response_id)
        if (
            generated is not None
            and generated.stored is not None
            and head.server_id == self._server.server_id
            and head.is_open
        ):
            return generated.stored
        ids = [row_id for row_id, _ in head.chain] if whole else [response_id]
        if whole:
            check_loaded(sum(num_bytes for _, num_bytes in head.chain), "previous_response_id")
        rows = await self._database.run(
            tenant, lambda session: response_rows.read_responses(session, ids), only_reads=True
        )
        stored: StoredResponse | None = None
        for row_id in reversed(ids):
            if row_id not in rows:
                raise no_response(response_id)
            response, inputs = rows[row_id]
            stored = StoredResponse(tenant, response, stored, inputs)
            if response["background"]:
                run = self.background.get(row_id)
                cancel = partial(self.request_cancel, row_id, tenant)
                stored.background = RemoteRun(cancel) if run is None else run.background
        assert stored is not None
        return stored

    # -- written -------------------------------------------------------------------------------------------------------

    async def begin_turn(self, conversation_id: str, tenant: str, response_id: str, number: int) -> ConversationTurn:
        """Begin a response in a conversation; `abandon` or `begin` follows.

        Args:
            number: of the response's own input items.

        Raises:
            ApiError: 404, 409 or 400 (`conversation_rows.begin_turn`).
        """
        self.open[response_id] = _OpenResponse(tenant, conversation_id=conversation_id)
        try:
            return await self._database.run(
                tenant,
                lambda session: conversation_rows.begin_turn(
                    session, self._server, conversation_id, tenant, response_id, number
                ),
            )
        except BaseException as error:
            if isinstance(error, ApiError) and error.status_code < 500:
                del self.open[response_id]  # nothing is written
            else:
                self.abandon(response_id)
            raise

    async def begin(self, stored: StoredResponse) -> None:
        """Commit a response that begins, if it is stored; `abandon` or `start` follows.

        Raises:
            ApiError: 404 if the response that it continues is gone, 429 if too many are in the background, 503.
        """
        if not stored.response["store"]:
            return
        generated = self.open.setdefault(stored.name, _OpenResponse(stored.tenant))
        documents = ResponseDocuments(stored.response, list(stored.inputs))
        generated.begun_bytes = await self._database.run(
            stored.tenant,
            lambda session: response_rows.insert_response(
                session,
                self._server,
                stored.tenant,
                documents,
                ttl_s=self._ttl_s,
                most_background=self._most_background,
            ),
            stored.body_bytes,
        )
        generated.is_inserted = True
        self._database.written_responses += 1

    def start(self, stored: StoredResponse) -> None:
        """Hold a response that is generated from now on, and its events if it is in the background; `end` follows."""
        if stored.name in self.open:
            self.open[stored.name].stored = stored
        if stored.background is not None:
            self.background.add(stored)

    def abandon(self, response_id: str) -> None:
        """Undo `begin_turn` and `begin` for a response that is not generated."""
        generated = self.open.get(response_id)
        if generated is None:
            return

        def undo(session: Session) -> None:
            if generated.conversation_id is not None:
                conversation_rows.end_turn(
                    session, generated.conversation_id, generated.tenant, response_id, (), self._ttl_s
                )
            response_rows.remove_begun(session, response_id, self._server.server_id)

        async def undone() -> None:
            try:
                await self._database.run(generated.tenant, undo, frees=True)
            finally:
                self.open.pop(response_id, None)  # what is left is undone at a heartbeat

        self._begin_task(undone())

    async def finish(self, stored: StoredResponse) -> None:
        """Commit a final response, and its items to its conversation.

        Raises `ApiError`: 503 `state_unavailable`, `state_full` or `server_lost`.
        """
        generated = self.open.get(stored.name)
        if generated is not None:
            generated.finishing = generated.finishing or self._begin_task(self._commit(generated, stored))
            await asyncio.shield(generated.finishing)

    def end(self, stored: StoredResponse) -> None:
        """Commit the end of a response behind its last event, if `finish` was not called."""
        generated = self.open.get(stored.name)
        if generated is not None and generated.finishing is None:
            generated.finishing = self._begin_task(self._commit(generated, stored))

    async def delete(self, response_id: str, tenant: str) -> StoredResponse:
        """Delete a response of a tenant. Raises 404."""
        stored = await self.find(response_id, tenant)
        delete = partial(response_rows.delete_response, response_id=response_id, tenant=tenant)
        await self._database.run(tenant, delete, frees=True)
        self.background.forget(response_id)
        return stored

    async def request_cancel(self, response_id: str, tenant: str) -> None:
        """Have another server end a response, and wait for some heartbeats until it has."""
        cancel = partial(response_rows.request_cancel, response_id=response_id, tenant=tenant)
        await self._database.run(tenant, cancel, frees=True)
        for _ in range(4):
            await asyncio.sleep(self.poll_s)
            try:
                if not (await self._head(response_id, tenant)).is_open:
                    return
            except ApiError as error:
                if error.status_code == 404:
                    return
                raise

    def inserted(self) -> list[str]:
        """Ids of those in `open` that have a row."""
        return [response_id for response_id, generated in self.open.items() if generated.is_inserted]

    def heard(self, beat: Heartbeat, before: Sequence[str]) -> None:
        """Cancel the responses in the background that clients of other servers have cancelled or deleted.

        Args:
            beat: what the database knows of this server's responses.
            before: `inserted` before the heartbeat.
        """
        for response_id in before:
            generated = self.open.get(response_id)
            if (
                generated is None
                or generated.stored is None
                or generated.stored.background is None
                or generated.finishing is not None
            ):
                continue
            if response_id in beat.cancelled or response_id not in beat.open:
                self._begin_task(generated.stored.background.cancel())

    async def close(self, timeout_s: float) -> None:
        """Wait until the ends of responses are committed."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def _commit(self, generated: _OpenResponse, stored: StoredResponse) -> None:
        documents = ResponseDocuments(stored.response, list(stored.inputs))
        try:
            while True:
                try:
                    await self._settle(generated, documents, frees=False)
                    return
                except ApiError as error:
                    if error.code == FULL:
                        await self._settle_failed(generated, documents, error)
                    if error.code != "state_unavailable" or stored.background is None or self._closed:
                        raise
                await asyncio.sleep(_RETRY_S)
        finally:
            self.open.pop(stored.name, None)  # a row that is still open fails at a heartbeat

    async def _settle(self, generated: _OpenResponse, documents: ResponseDocuments, *, frees: bool) -> None:
        response, inputs = documents
        turn_items = [*inputs, *response["output"]] if response["status"] in _ANSWERED else []

        def settle(session: Session) -> int:
            num_bytes: int | None = 0
            if generated.is_inserted:
                num_bytes = response_rows.settle_response(
                    session, self._server, generated.tenant, documents, generated.begun_bytes
                )
            if num_bytes is not None and generated.conversation_id is not None:
                turn = generated.conversation_id, generated.tenant, response["id"], turn_items, self._ttl_s
                added = conversation_rows.end_turn(session, *turn)
                num_bytes = None if added is None else num_bytes + added
            if num_bytes is None:
                raise ApiError(503, LOST["message"], code=LOST["code"])
            return num_bytes

        self._database.written_bytes += await self._database.run(
            generated.tenant, settle, generated.begun_bytes, frees=frees
        )

    async def _settle_failed(self, generated: _OpenResponse, documents: ResponseDocuments, error: ApiError) -> None:
        """Store without its output that a response has failed, for which a full disk has room."""
        why = {"status": "failed", "error": {"code": error.code, "message": error.detail}, "output": []}
        failed = ResponseDocuments(documents.response | why | {"incomplete_details": None}, documents.inputs)
        with suppress(ApiError):
            await self._settle(generated, failed, frees=True)

    def _begin_task(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the end of a response is not stored: %s", error)


def no_response(response_id: str) -> ApiError:
    """Status 404, for a response that is not stored, or not for this key."""
    return ApiError(404, f"no response has the id {response_id[:200]!r}", code="response_not_found")
