"""Stored responses: those that this process works on in memory (`ResponseStore`), all of them in a database if there is one.

A response is committed when it begins, before a client sees its id, and when it ends, before a client sees its end.
Each use of a stored response asks the database whether it still exists, since another server may have deleted it.
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
from jinfercept.server.state import conversation_rows, response_rows
from jinfercept.server.state.conversation_rows import ConversationTurn
from jinfercept.server.state.database import FULL, StateDatabase
from jinfercept.server.state.queries import ServerClock, check_loaded
from jinfercept.server.state.remote_run import RemoteRun
from jinfercept.server.state.response_rows import LOST, ResponseDocuments, ResponseHead
from jinfercept.server.state.response_store import ResponseStore, no_response
from jinfercept.server.state.stored_response import StoredResponse, measured
from jinfercept.server.state.upkeep import Heartbeat

_RETRY_S = 1.0
"""Seconds between attempts to store the end of a response in the background."""
_ANSWERED = ("completed", "incomplete")

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _OpenResponse:
    """A response that this process generates, until its end is committed.

    Attributes:
        stored: the response; None until its request is prepared.
        conversation_id: the conversation that it is a turn of.
        begun_bytes: of its row's document.
        is_inserted: whether it has a row.
        finishing: commits its end.
    """

    owner: str
    stored: StoredResponse | None = None
    conversation_id: str | None = None
    begun_bytes: int = 0
    is_inserted: bool = False
    finishing: asyncio.Task[None] | None = None


@final
class ResponseRepository:
    """Finds, stores and deletes responses. All methods run on the event loop.

    Args:
        cache: the responses in memory.
        database: of conversations, and of responses if it outlives the process.
        server: this server.
        ttl_s: seconds until a response expires.
        most_background: maximum responses of one owner in the background at a time.
        poll_s: seconds between two looks at a response that another server generates.

    Attributes:
        open: responses that this process generates, by id; only read elsewhere.
    """

    def __init__(
        self,
        cache: ResponseStore,
        database: StateDatabase,
        server: ServerClock,
        *,
        ttl_s: float,
        most_background: int,
        poll_s: float,
    ) -> None:
        self._cache, self._database, self._server = cache, database, server
        self._ttl_s, self._most_background, self.poll_s = ttl_s, most_background, poll_s
        self.open: dict[str, _OpenResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # -- found ---------------------------------------------------------------------------------------------------------

    def holds(self, response_id: str, owner: str) -> int:
        """Whether this process has a response of an owner in memory: 0 if not, 2 if it generates the response now."""
        mine = self.open.get(response_id)
        return int(self._cache.has(response_id, owner, _now())) if mine is None else 2 * (mine.owner == owner)

    async def find(self, response_id: str, owner: str) -> StoredResponse:
        """A response of an owner. Those that it continues are known only if this process holds it. Raises 404."""
        if not self._database.outlives:
            return self._cache.get(response_id, owner, _now())
        head = await self._head(response_id, owner)
        if (held := self._held(head, owner)) is not None:
            return held
        rows = await self._read(owner, [response_id])
        if response_id not in rows:
            raise no_response(response_id)
        return self._built(owner, rows[response_id], None, head)

    async def load(self, response_id: str, owner: str) -> StoredResponse:
        """A response of an owner with all that it continues. Raises 404; 400 if they are too long to load."""
        if not self._database.outlives:
            return self._cache.get(response_id, owner, _now())
        head = await self._head(response_id, owner)
        if (held := self._held(head, owner)) is not None:
            return held
        ids = [row_id for row_id, _ in head.chain]
        known = next((place for place, row_id in enumerate(ids) if place and self._settled(row_id, owner)), len(ids))
        check_loaded(sum(num_bytes for _, num_bytes in head.chain[:known]), "previous_response_id")
        needed = ids[:known]
        previous = self._settled(ids[known], owner) if known < len(ids) else None
        rows = await self._read(owner, needed)
        for row_id in reversed(needed):
            if row_id not in rows:
                raise no_response(response_id)
            previous = self._built(owner, rows[row_id], previous, head)
        assert previous is not None
        if not previous.is_open:
            self._cache.restore(previous, _now())
        return previous

    async def items(self, item_ids: Collection[str], owner: str) -> dict[str, Item]:
        """Items of an owner's responses and conversations by their ids, the oldest one of each id. Raises 404."""
        found = {} if self._database.outlives else self._cache.items(item_ids, owner, _now())
        if missing := set(item_ids) - found.keys():
            found |= await self._database.run(
                owner, lambda session: response_rows.read_items(session, owner, missing), only_reads=True
            )
        for item_id in item_ids:
            if item_id not in found:
                raise ApiError(404, f"there is no item {item_id[:200]!r}", param="input", code="item_not_found")
        return found

    async def _head(self, response_id: str, owner: str) -> ResponseHead:
        mine = self.open.get(response_id)
        if mine is not None and mine.owner == owner and mine.finishing is not None:
            await asyncio.wait((mine.finishing,), timeout=_RETRY_S)

        def read(session: Session) -> ResponseHead | None:
            return response_rows.read_head(session, self._server, response_id, owner)

        head = await self._database.run(owner, read, only_reads=True)
        if head is not None and head.is_open and not head.is_live and head.server_id != self._server.server_id:

            def fail(session: Session) -> ResponseHead | None:
                response_rows.fail_if_lost(session, self._server, response_id)
                return read(session)

            head = await self._database.run(owner, fail, frees=True)
        if head is None:
            if self._cache.held(response_id, owner) is not None:
                self._cache.discard(response_id)
            raise no_response(response_id)
        return head

    def _held(self, head: ResponseHead, owner: str) -> StoredResponse | None:
        """The response in memory, if it is in the state of its row or this process generates it."""
        response_id = head.chain[0][0]
        mine = self.open.get(response_id)
        held = mine.stored if mine is not None and mine.owner == owner else self._cache.held(response_id, owner)
        if held is None:
            return None
        is_mine = head.is_open and head.server_id == self._server.server_id
        return held if is_mine or held.response["status"] == head.status else None

    def _settled(self, response_id: str, owner: str) -> StoredResponse | None:
        held = self._cache.held(response_id, owner)
        return held if held is not None and held.is_settled else None

    async def _read(self, owner: str, response_ids: Sequence[str]) -> dict[str, tuple[ResponseDocuments, int]]:
        """Rows by id with their sizes in memory."""

        def read(session: Session) -> dict[str, tuple[ResponseDocuments, int]]:
            rows = response_rows.read_responses(session, response_ids)
            return {row_id: (row, measured(row.asked, row.response)) for row_id, row in rows.items()}

        return await self._database.run(owner, read, only_reads=True)

    def _built(
        self, owner: str, row: tuple[ResponseDocuments, int], previous: StoredResponse | None, head: ResponseHead
    ) -> StoredResponse:
        (response, asked), num_bytes = row
        background = RemoteRun(partial(self.request_cancel, response["id"], owner)) if response["background"] else None
        stored = StoredResponse(owner, response, previous, asked, background, num_bytes)
        stored.until_s = _now() + head.left_s
        return stored

    # -- written -------------------------------------------------------------------------------------------------------

    def check_background(self, owner: str) -> None:
        """See `ResponseStore.check_background`."""
        self._cache.check_background(owner)

    async def begin_turn(self, conversation_id: str, owner: str, response_id: str, number: int) -> ConversationTurn:
        """Begin a response in a conversation; `abandon` or `begin` follows.

        Args:
            number: of the response's own input items.

        Raises:
            ApiError: 404, 409 or 400 (`conversation_rows.begin_turn`).
        """
        self.open[response_id] = _OpenResponse(owner, conversation_id=conversation_id)
        try:
            return await self._database.run(
                owner,
                lambda session: conversation_rows.begin_turn(
                    session, self._server, conversation_id, owner, response_id, number
                ),
            )
        except BaseException as error:
            if isinstance(error, ApiError) and error.status_code < 500:
                del self.open[response_id]  # nothing is written
            else:
                self.abandon(response_id)
            raise

    async def begin(self, stored: StoredResponse) -> None:
        """Commit a response that begins, if it is stored in a database; `abandon` or `start` follows.

        Raises:
            ApiError: 404 if the response that it continues is gone, 429 if too many are in the background, 503.
        """
        if not self._is_saved(stored):
            return
        mine = self.open.setdefault(stored.name, _OpenResponse(stored.owner))
        documents = ResponseDocuments(stored.response, list(stored.asked))
        mine.begun_bytes = await self._database.run(
            stored.owner,
            lambda session: response_rows.insert_response(
                session,
                self._server,
                stored.owner,
                documents,
                ttl_s=self._ttl_s,
                most_background=self._most_background,
            ),
            stored.num_bytes,
        )
        mine.is_inserted = True

    def start(self, stored: StoredResponse) -> None:
        """Hold a response that is generated from now on; `end` follows."""
        if stored.name in self.open:
            self.open[stored.name].stored = stored
        if stored.response["store"]:
            self._cache.add(stored, _now())

    def abandon(self, response_id: str) -> None:
        """Undo `begin_turn` and `begin` for a response that is not generated."""
        mine = self.open.get(response_id)
        if mine is None:
            return

        def undo(session: Session) -> None:
            if mine.conversation_id is not None:
                conversation_rows.end_turn(session, mine.conversation_id, mine.owner, response_id, (), self._ttl_s)
            response_rows.remove_begun(session, response_id, self._server.server_id)

        async def undone() -> None:
            try:
                await self._database.run(mine.owner, undo, frees=True)
            finally:
                self.open.pop(response_id, None)  # what is left is undone at a heartbeat

        self._begin_task(undone())

    def charge(self, response_id: str, num_bytes: int) -> bool:
        """See `ResponseStore.charge`."""
        return self._cache.charge(response_id, num_bytes)

    async def finish(self, stored: StoredResponse) -> None:
        """Commit a final response, and its items to its conversation.

        Raises `ApiError`: 503 `state_unavailable`, `state_full` or `server_lost`.
        """
        mine = self.open.get(stored.name)
        if mine is not None:
            mine.finishing = mine.finishing or self._begin_task(self._commit(mine, stored))
            await asyncio.shield(mine.finishing)

    def end(self, stored: StoredResponse) -> None:
        """Settle a final response in memory; its end is committed later if `finish` was not called."""
        mine = self.open.get(stored.name)
        if mine is not None and mine.finishing is None:
            mine.finishing = self._begin_task(self._commit(mine, stored))
        self._cache.settle(stored.name)

    async def delete(self, response_id: str, owner: str) -> StoredResponse:
        """Delete a response of an owner. Raises 404."""
        if not self._database.outlives:
            return self._cache.delete(response_id, owner, _now())
        stored = await self.find(response_id, owner)
        delete = partial(response_rows.delete_response, response_id=response_id, owner=owner)
        await self._database.run(owner, delete, frees=True)
        self._cache.discard(response_id)
        return stored

    async def request_cancel(self, response_id: str, owner: str) -> None:
        """Have another server end a response, and wait for some heartbeats until it has."""
        cancel = partial(response_rows.request_cancel, response_id=response_id, owner=owner)
        await self._database.run(owner, cancel, frees=True)
        for _ in range(4):
            await asyncio.sleep(self.poll_s)
            try:
                if not (await self._head(response_id, owner)).is_open:
                    return
            except ApiError as error:
                if error.status_code == 404:
                    return
                raise

    def inserted(self) -> list[str]:
        """Ids of those in `open` that have a row."""
        return [response_id for response_id, mine in self.open.items() if mine.is_inserted]

    def heard(self, beat: Heartbeat, before: Sequence[str]) -> None:
        """Cancel the responses in the background that clients of other servers have cancelled or deleted.

        Args:
            beat: what the database knows of this server's responses.
            before: `inserted` before the heartbeat.
        """
        for response_id in before:
            mine = self.open.get(response_id)
            if mine is None or mine.stored is None or mine.stored.background is None or mine.finishing is not None:
                continue
            if response_id in beat.cancelled or response_id not in beat.open:
                self._begin_task(mine.stored.background.cancel())

    async def close(self, timeout_s: float) -> None:
        """Wait until the ends of responses are committed."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _is_saved(self, stored: StoredResponse) -> bool:
        return self._database.outlives and stored.response["store"]

    async def _commit(self, mine: _OpenResponse, stored: StoredResponse) -> None:
        documents = ResponseDocuments(stored.response, list(stored.asked))
        try:
            while True:
                try:
                    await self._settle(mine, documents, stored.num_bytes, frees=False)
                    self._database.written_bytes += stored.num_bytes
                    return
                except ApiError as error:
                    if error.code == FULL:
                        await self._settle_failed(mine, documents, error)
                    if error.code != "state_unavailable" or stored.background is None or self._closed:
                        raise
                await asyncio.sleep(_RETRY_S)
        finally:
            self.open.pop(stored.name, None)  # a row that is still open fails at a heartbeat

    async def _settle(self, mine: _OpenResponse, documents: ResponseDocuments, num_bytes: int, *, frees: bool) -> None:
        response, inputs = documents
        turn_items = [*inputs, *response["output"]] if response["status"] in _ANSWERED else []

        def settle(session: Session) -> None:
            settled = not mine.is_inserted or response_rows.settle_response(
                session, self._server, mine.owner, documents, mine.begun_bytes
            )
            if settled and mine.conversation_id is not None:
                turn = mine.conversation_id, mine.owner, response["id"], turn_items, self._ttl_s
                settled = conversation_rows.end_turn(session, *turn)
            if not settled:
                raise ApiError(503, LOST["message"], code=LOST["code"])

        await self._database.run(mine.owner, settle, num_bytes, frees=frees)

    async def _settle_failed(self, mine: _OpenResponse, documents: ResponseDocuments, error: ApiError) -> None:
        """Store without its output that a response has failed, for which a full disk has room."""
        why = {"status": "failed", "error": {"code": error.code, "message": error.detail}, "output": []}
        failed = ResponseDocuments(documents.response | why | {"incomplete_details": None}, documents.asked)
        with suppress(ApiError):
            await self._settle(mine, failed, 0, frees=True)

    def _begin_task(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the end of a response is not stored: %s", error)


def _now() -> float:
    return asyncio.get_running_loop().time()
