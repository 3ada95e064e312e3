"""The database of the stored state: SQLite in a file or in memory, or PostgreSQL.

Work runs in threads in which the API keys take turns, never on the event loop, and in one transaction each. It is repeated
while the database does not answer, up to a limit of time; then the request is answered 503. So work has to have the same effect
if it is run twice. Encryption is left to the database and its file system.
"""

import asyncio
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, final
from weakref import WeakSet

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from jinfercept.errors import ConfigError
from jinfercept.protocols.errors import ApiError
from jinfercept.state.migrate import create_tables, migrate
from jinfercept.state.queries import clock
from jinfercept.state.sqlite_file import ONLY_READS, SpareRoom, deleted_lean, is_damaged, is_full, sqlite_engine
from jinfercept.state.tables import ServerRow
from jinfercept.state.tenant_pool import RETRY_S, TenantPool
from jinfercept.state.trusted_clock import TrustedClock

log = logging.getLogger(__name__)

_THREADS = 4
_NUM_CONNECTIONS = _THREADS + 1
"""One of them is for heartbeats."""
_PER_KEY = 3
_MAX_WAITING = 256
"""Maximum waiting jobs of one key."""
FULL = "state_full"
"""Code of the error of a full disk."""
_PAUSE_S = 0.1
"""Seconds before work is repeated."""
_COMMIT_S = 1.0
"""Seconds that the commit of work that ended in time may take."""
_SCHEME = re.compile(r"(postgres(ql)?|mysql|mariadb)(\+\w+)?:", re.IGNORECASE)
"""Begins a URL, also one that lacks its slashes."""
_FIX = "give a path, or sqlite:///PATH, or postgresql://USER:PASSWORD@HOST/DATABASE"
_AT_FIX = "write an @ in a password as %40"


@final
class StateDatabase:
    """A database with the current tables.

    Args:
        url: URL or path of a SQLite file; None: SQLite in memory, for one process.
        timeout_s: seconds after which work that the database does not finish is answered 503.

    Attributes:
        outlives: whether what is stored outlives the process.
        name: URL without the password, for logs.
        written_bytes, written_responses: counted bytes and responses that were written since the last sweep.

    Raises:
        ConfigError: the URL is wrong, the database cannot be reached or written, its disk is full, or it belongs to another
            program or a newer version of jinfercept.
    """

    def __init__(self, url: str | None, timeout_s: float = 5.0) -> None:
        self.outlives = url is not None
        parsed = URL.create("sqlite") if url is None else parse_url(url)
        self.name = parsed.set(query={}).render_as_string(hide_password=True)  # parameters may have passwords too
        self.written_bytes = self.written_responses = 0
        self._timeout_s = timeout_s
        self._turn = nullcontext() if self.outlives else threading.Lock()  # in memory there is one connection
        self._engine, self._clock = _engine(parsed, timeout_s), TrustedClock()
        self._remote = WeakSet[Any]()  # connections of PostgreSQL
        if parsed.get_backend_name() == "postgresql":
            event.listen(self._engine, "connect", lambda connection, record: self._remote.add(connection))
        self._reading = self._engine.execution_options(**{ONLY_READS: True})
        self._spare: SpareRoom | None = None
        self._is_full = False
        try:
            self._open()
            if self.outlives and parsed.database is not None and parsed.get_backend_name() == "sqlite":
                self._spare = SpareRoom(self._engine, parsed.database)
                if not self._spare.hold():
                    raise self._without_room()
        except BaseException:
            self._engine.dispose()
            raise
        threads = _THREADS if self.outlives else 1
        self._threads = TenantPool("state", threads, min(_PER_KEY, threads), _MAX_WAITING)

    async def run[T](
        self,
        tenant: str,
        work: Callable[[Session], T],
        num_bytes: int = 0,
        *,
        only_reads: bool = False,
        frees: bool = False,
    ) -> T:
        """The result of work in one transaction, which is committed when this returns.

        Args:
            tenant: for whom it is done; tenants take turns.
            work: has the same effect if it is run twice.
            num_bytes: approximate size of its input.
            only_reads: whether it writes nothing, so that it need not wait for those that write.
            frees: whether it deletes, or is as small, so that it may use the room that is spared for a full disk.

        Raises:
            ApiError: 503 `state_unavailable` if the database does not answer in time, and then nothing is committed, unless
                it is the commit that lasts; 503 `state_full` if its disk is full; 429 if too much work of the tenant waits.
        """
        deadline_s = time.monotonic() + self._timeout_s
        committed: list[T] = []
        try:
            async with asyncio.timeout(self._timeout_s + _COMMIT_S):
                await self._threads.run(
                    tenant, num_bytes, lambda: committed.append(self._repeated(work, deadline_s, only_reads, frees))
                )
                return committed[0]
        except (TimeoutError, PoolTimeout, DBAPIError) as error:
            if committed:  # in time, but the event loop was not there to see it
                return committed[0]
            if isinstance(error, DBAPIError) and is_full(error):
                raise full() from error
            if isinstance(error, DBAPIError) and not (_is_absent(error) or is_damaged(error)):
                raise
            raise unavailable() from error

    def run_now[T](self, work: Callable[[Session], T], *, only_reads: bool = False, frees: bool = False) -> T:
        """The result of work in one transaction, in this thread; on a full disk once more, with more room.

        Args:
            work: has the same effect if it is run twice.
            only_reads, frees: see `run`.

        Raises:
            SQLAlchemyError: any.
        """
        try:
            result = self._transacted(work, only_reads, frees)
            self._is_full = self._is_full and only_reads
            return result
        except DBAPIError as error:
            if not is_full(error):
                raise
            if not self._is_full:
                log.error("the disk of the stored state is full: %s", self.name)
            self._is_full = True
            if self._spare is None:
                raise
        if not frees:
            self._spare.shorten_log()
            return self._transacted(work, only_reads, frees)
        with self._spare.lent():
            return self._transacted(lambda session: deleted_lean(session, work), only_reads, frees)

    def run_at_start[T](self, work: Callable[[Session], T]) -> T:
        """The result of work without which a server cannot start. Raises `ConfigError`."""
        try:
            return self.run_now(work)
        except SQLAlchemyError as error:
            raise self._unusable(error) from None

    def keep_room(self) -> None:
        """Take the spare room again that other programs have used."""
        if self._spare is not None:
            self._spare.hold()

    def _transacted[T](self, work: Callable[[Session], T], only_reads: bool, frees: bool) -> T:
        with self._turn, self._session(only_reads) as session, session.begin():
            result = work(session)
            if self._spare is not None and not (only_reads or frees):
                session.flush()
                self._spare.check_growth(session)
            return result

    def _session(self, only_reads: bool) -> Session:
        return Session(self._reading if only_reads else self._engine, info={"clock": self._clock})

    def close(self) -> None:
        """Close the threads and connections, those also that wait for a server that does not answer."""
        self._threads.close()
        if self._spare is not None:
            self._spare.close()
        for connection in list(self._remote):
            if not connection.closed:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as waiting:
                    waiting.shutdown(socket.SHUT_RDWR)
        self._engine.dispose()

    def _open(self) -> None:
        """Create or migrate the tables, and write to them. Waits for a database that starts up."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                migrate(self._engine, self.name) if self.outlives else create_tables(self._engine)
                return self._transacted(_try_writing, only_reads=False, frees=True)
            except DBAPIError as error:
                if not _is_absent(error) or is_full(error) or time.monotonic() >= deadline_s:
                    raise self._unusable(error) from None
            time.sleep(_PAUSE_S)

    def _unusable(self, error: SQLAlchemyError) -> ConfigError:
        if isinstance(error, DBAPIError) and is_full(error):
            return self._without_room()
        why = " ".join(str(getattr(error, "orig", None) or error).split())
        return ConfigError(
            "the database of the stored state cannot be opened and written", got=f"{self.name}: {why}", fix=_FIX
        )

    def _without_room(self) -> ConfigError:
        fix = "free some megabytes there, or give another --state-url"
        return ConfigError("the disk of the stored state is full", got=self.name, fix=fix)

    def _repeated[T](self, work: Callable[[Session], T], deadline_s: float, only_reads: bool, frees: bool) -> T:
        def in_time(session: Session) -> T:
            result = work(session)
            session.flush()
            if time.monotonic() >= deadline_s:
                raise TimeoutError  # which rolls the work back: its request is answered 503
            return result

        while time.monotonic() < deadline_s:
            try:
                return self.run_now(in_time, only_reads=only_reads, frees=frees)
            except DBAPIError as error:
                if not _is_absent(error) or is_full(error) or time.monotonic() + _PAUSE_S >= deadline_s:
                    raise
            time.sleep(_PAUSE_S)
        raise TimeoutError


def unavailable() -> ApiError:
    """Status 503, for a request whose state cannot be read or written."""
    message = "the database of the stored state does not answer: retry, or send store: false"
    return ApiError(503, message, code="state_unavailable", headers={"Retry-After": f"{RETRY_S}"})


def full() -> ApiError:
    """Status 503, for a request whose state has no room."""
    message = "the disk of the stored state is full: delete responses or conversations, or send store: false"
    return ApiError(503, message, code=FULL)


def _try_writing(session: Session) -> None:
    clock(session)
    row = ServerRow(id=f"start-{uuid.uuid4().hex}", seen_at=0.0)
    session.add(row)
    session.flush()
    session.delete(row)


def _is_absent(error: DBAPIError) -> bool:
    """Whether an error is about the connection, locks or room on the disk, and not about the statement."""
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


def parse_url(url: str) -> URL:
    """The URL of a database, with its driver, a path as an absolute one. Raises `ConfigError` for one that cannot be used."""
    try:
        url.encode()  # bytes of a flag that are not UTF-8 cannot be
        is_url = "://" in url or _SCHEME.match(url)
        parsed = make_url(url) if is_url else URL.create("sqlite", database=url)
    except (ArgumentError, ValueError):
        raise ConfigError("state_url is not a URL", got="a text that cannot be parsed", fix=_FIX) from None
    kind = parsed.drivername.partition("+")[0]
    if kind in ("postgresql", "postgres"):
        if parsed.host is not None and "@" in parsed.host:  # a piece of the password
            raise ConfigError("state_url has more than one @", got="a text that cannot be parsed", fix=_AT_FIX)
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise ConfigError("state_url names a database that is not supported", got=kind, fix=_FIX)
    path = parsed.database
    if not path or path == ":memory:" or path.startswith("file:"):
        raise ConfigError(
            "state_url names no file", got=url[:200], fix="leave it out to store in memory, or give a path"
        )
    if parsed.host is not None or parsed.query:
        raise ConfigError("a SQLite URL may have only a path", got="a host, or parameters", fix=_FIX)
    return parsed.set(drivername="sqlite+pysqlite", database=os.path.abspath(path))  # a tool may change the directory


def _engine(url: URL, timeout_s: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        return sqlite_engine(url, timeout_s, _NUM_CONNECTIONS)
    seconds = max(1, round(timeout_s))
    arguments = {"connect_timeout": seconds, "prepare_threshold": None, "tcp_user_timeout": 1000 * seconds}
    try:
        engine = create_engine(
            url,
            connect_args=arguments,
            hide_parameters=True,
            pool_pre_ping=True,
            pool_size=_NUM_CONNECTIONS,
            max_overflow=0,
            pool_timeout=timeout_s,
        )
    except (ModuleNotFoundError, NoSuchModuleError):
        raise ConfigError(
            "a database of PostgreSQL needs one more package",
            got="no package psycopg",
            fix="pip install 'jinfercept[postgresql]'",
        ) from None

    @event.listens_for(engine, "connect")
    def limit(connection: Any, record: object) -> None:
        milliseconds = round(1000 * timeout_s)
        with connection.cursor() as cursor:
            for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                cursor.execute(f"SET {name} = {milliseconds}")
        connection.commit()

    return engine
