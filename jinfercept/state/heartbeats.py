"""Heartbeats of this server in the database of the stored state, sweeps, and the calls of the inbox.

They run in a thread of their own, so that neither slow work for clients nor a slow database delays the rest. While the database
does not answer they are repeated; the first failure and the recovery are logged.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from jinfercept.errors import RequestError
from jinfercept.state import inbox_rows, upkeep
from jinfercept.state.database import StateDatabase
from jinfercept.state.inbox_rows import TakenAnswer
from jinfercept.state.queries import ServerClock
from jinfercept.state.response_store import ResponseStore
from jinfercept.state.upkeep import Heartbeat, StateLimits
from jinfercept.tools.inbox import Inbox

LOST_BEATS = 5
"""Heartbeats without which a server is lost."""
_SWEEP_S = 10.0
_MOST_SWEEPS = 50
"""Maximum sweeps between two heartbeats."""
_WHY_CHARS = 300
"""Maximum characters of the database's own error in the log."""
_SWEEP_PART = 16
"""A sweep begins early when this part of the limit has been written."""

log = logging.getLogger(__name__)


def new_server(heartbeat_s: float) -> ServerClock:
    """This process as a server of the database, with a new name."""
    return ServerClock(f"{socket.gethostname()[:40]}-{uuid.uuid4().hex[:12]}", LOST_BEATS * heartbeat_s)


@final
class StateUpkeep:
    """The upkeep of one server.

    Args:
        responses: are cancelled if clients of other servers have cancelled them.
        inbox: returns the inbox, whose calls are shown to other servers and get their answers; None: there is none.
    """

    def __init__(
        self,
        database: StateDatabase,
        server: ServerClock,
        responses: ResponseStore,
        inbox: Callable[[], Inbox | None],
        limits: StateLimits,
        heartbeat_s: float,
    ) -> None:
        self._database, self._server, self._responses = database, server, responses
        self._inbox, self._limits, self._heartbeat_s = inbox, limits, heartbeat_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jinfercept-upkeep")
        self._task: asyncio.Task[None] | None = None
        self._swept_s = time.monotonic()
        self._failing = False
        database.run_at_start(lambda session: upkeep.beat(session, server, responses.open))

    def start(self) -> None:
        """Begin; called on the event loop."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self, timeout_s: float) -> None:
        """End: responses that are not settled fail in the database."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        leaving = asyncio.get_running_loop().run_in_executor(
            self._thread, self._attempt, lambda session: upkeep.leave(session, self._server)
        )
        await asyncio.wait((leaving,), timeout=timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = self._responses.inserted()
            inbox = self._inbox()
            try:
                beat, answers = await loop.run_in_executor(self._thread, self._beat, inbox)
                if beat is not None:
                    self._responses.heard(beat, before)
                for answer in answers:
                    if inbox is not None:
                        with suppress(RequestError):  # the call has ended meanwhile
                            (inbox.decline if answer.is_declined else inbox.answer)(answer.id, answer.text)
            except Exception:
                log.exception("the upkeep of the stored state failed")
            await asyncio.sleep(self._heartbeat_s)

    def _beat(self, inbox: Inbox | None) -> tuple[Heartbeat | None, list[TakenAnswer]]:
        beat = self._attempt(lambda session: upkeep.beat(session, self._server, self._responses.open))
        if beat is None:
            return None, []
        answers = [] if inbox is None else self._answers(inbox)
        now = time.monotonic()
        database, limits = self._database, self._limits
        much = database.written_bytes * _SWEEP_PART > limits.most_bytes
        if limits.most_responses is not None:
            much |= database.written_responses * _SWEEP_PART > limits.most_responses
        if much or now - self._swept_s >= _SWEEP_S:
            self._swept_s, database.written_bytes, database.written_responses = now, 0, 0
            database.keep_room()
            for _ in range(_MOST_SWEEPS):
                if not self._attempt(lambda session: upkeep.sweep(session, self._server, self._limits)):
                    break
                self._attempt(lambda session: upkeep.beat(session, self._server, self._responses.open))
        return beat, answers or []

    def _answers(self, inbox: Inbox) -> list[TakenAnswer] | None:
        """Answers that other servers have taken; a call that cannot be mirrored keeps nothing else from its upkeep."""
        try:
            calls = {call.id: (call.tenant, asdict(call)) for call in inbox.pending()}
            return self._attempt(lambda session: inbox_rows.mirror_calls(session, self._server, calls))
        except Exception:
            log.exception("the calls that wait for a person could not be stored")
            return None

    def _attempt[T](self, work: Callable[[Session], T]) -> T | None:
        """The result of work; None if the database fails."""
        try:
            result = self._database.run_now(work, frees=True)
        except SQLAlchemyError as error:
            if not self._failing:
                why = " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())[:_WHY_CHARS]
                log.error("the database of the stored state fails: %s: %s", self._database.name, why)
            self._failing = True
            return None
        if self._failing:
            log.info("the database of the stored state answers again: %s", self._database.name)
        self._failing = False
        return result
