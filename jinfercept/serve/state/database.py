"""The database of the stored state: a file of SQLite, SQLite in memory, or another one that SQLAlchemy opens by its URL.

Encryption is left to the database and its file system.
"""

import logging
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable
from typing import Any, final

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from jinfercept.errors import ConfigError
from jinfercept.serve.access.key_limits import RETRY_S
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.state.entries import ENTRIES, TABLES, Entries, StateLimits

log = logging.getLogger(__name__)

NUM_CONNECTIONS = 4
"""Transactions that run at the same time."""
_MOST_MEMORY_BYTES = 2**29
"""Maximum bytes of a stored state in memory."""
_ONLY_READS = "jinfercept_only_reads"
"""Execution option of connections that write nothing."""
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite's errors of a full disk, of a quota, and of a limit of the size of files."""
_FIX = "give a path, or sqlite:///PATH, or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE; write an @ in a password as %40"
_SHOWN = 4
"""Maximum tables in an error."""
_WHY_CHARS = 300
"""Maximum characters of the database's own error in the log."""


@final
class StateDatabase:
    """A database with the tables of the stored state.

    Args:
        url: URL or path of a SQLite file; None: SQLite in memory, for one process.
        timeout_s: seconds to wait for a lock, and for a connection.

    Attributes:
        outlives: whether what is stored outlives the process.
        name: URL without the password, for logs.
        limits: of the entries; lower in memory.

    Raises:
        ConfigError: the URL is wrong, the database cannot be opened or written, its disk is full, or it is a file of another
            program.
    """

    def __init__(self, url: str | None, limits: StateLimits | None = None, timeout_s: float = 5.0) -> None:
        self.outlives, self.timeout_s, self.limits = url is not None, timeout_s, limits or StateLimits()
        if not self.outlives:
            self.limits = self.limits._replace(most_bytes=min(self.limits.most_bytes, _MOST_MEMORY_BYTES))
        parsed = URL.create("sqlite") if url is None else parse_url(url)
        self.name = parsed.set(query={}).render_as_string(hide_password=True)  # parameters may have passwords too
        self._engine = _engine(parsed, timeout_s)
        self._reading = self._engine.execution_options(**{_ONLY_READS: True})
        try:
            self._create_tables()
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise self._unusable(error) from None
        except ConfigError:
            self._engine.dispose()
            raise

    def transact[T](self, work: Callable[[Entries], T], *, writes: bool = True) -> T:
        """The result of work in one transaction, which is committed when this returns.

        Args:
            writes: whether it writes; else it need not wait for those that do.

        Raises:
            ApiError: raised by the work; 503 `state_unavailable` or `state_full` if the database fails.
        """
        try:
            with (self._engine if writes else self._reading).begin() as connection:
                return work(Entries(connection, time.time(), self.limits.ttl_s))
        except SQLAlchemyError as error:
            log.error("the database of the stored state fails: %s: %s", self.name, _why(error)[:_WHY_CHARS])
            raise (_full() if _is_full(error) else unavailable()) from error

    def close(self) -> None:
        self._engine.dispose()

    def _create_tables(self) -> None:
        try:
            with self._engine.begin() as connection:
                self._create_in(connection)
        except DBAPIError:  # another server has created them meanwhile, or is about to
            with self._engine.begin() as connection:
                self._create_in(connection)

    def _create_in(self, connection: Connection) -> None:
        """Create the tables that are missing, and write to them: what fails, fails now rather than at the first request."""
        tables = inspect(connection).get_table_names()
        if connection.dialect.name == "sqlite" and tables and ENTRIES.name not in tables:
            raise ConfigError(
                "the file of the stored state belongs to another program or an older version of jinfercept",
                got=f"{self.name}: with tables {', '.join(sorted(tables)[:_SHOWN])}",
                fix="give another path as --state-url; a new file is created",
            )
        TABLES.create_all(connection)
        entries, name = Entries(connection, 0.0, 0.0), f"start-{uuid.uuid4().hex}"
        entries.insert(name, "", {})
        entries.delete(name, "")

    def _unusable(self, error: SQLAlchemyError) -> ConfigError:
        if _is_full(error):
            fix = "free some megabytes there, or give another --state-url"
            return ConfigError("the disk of the stored state is full", got=self.name, fix=fix)
        message = "the database of the stored state cannot be opened and written"
        return ConfigError(message, got=f"{self.name}: {_why(error)}", fix=_FIX)


def unavailable() -> ApiError:
    message = "the database of the stored state does not answer: retry, or send store: false"
    return ApiError(503, message, code="state_unavailable", headers={"Retry-After": f"{RETRY_S}"})


def _full() -> ApiError:
    message = "the disk of the stored state is full: free some space there, or send store: false"
    return ApiError(503, message, code="state_full")


def _why(error: SQLAlchemyError) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _is_full(error: SQLAlchemyError) -> bool:
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) in _FULL


def parse_url(url: str) -> URL:
    """The URL of a database; a path as one of SQLite, made absolute.

    Raises:
        ConfigError: it cannot be used; the message has its scheme only, since any other part may be one of the password.
    """
    try:
        url.encode()  # bytes of a flag that are not UTF-8 cannot be
        parsed = make_url(url) if "://" in url or "@" in url else URL.create("sqlite", database=url)
    except (ArgumentError, ValueError):
        parsed = URL.create("")
    kind, path, host = parsed.get_backend_name(), parsed.database or "", parsed.host or ""
    if kind != "sqlite" and kind and "@" not in host:
        return parsed
    if kind != "sqlite" or host or parsed.query or path in ("", ":memory:") or path.startswith("file:"):
        got = kind or "a text that cannot be parsed"
        raise ConfigError("state_url is no path, and no URL that is supported", got=got, fix=_FIX)
    return parsed.set(drivername="sqlite", database=os.path.abspath(path))  # a tool may change the directory


def _engine(url: URL, timeout_s: float) -> Engine:
    is_sqlite, path = url.get_backend_name() == "sqlite", url.database
    pool: dict[str, Any] = {"pool_size": NUM_CONNECTIONS, "max_overflow": 0, "pool_timeout": timeout_s}
    arguments: dict[str, Any] = {"check_same_thread": False, "timeout": timeout_s} if is_sqlite else {}
    if is_sqlite and path is None:
        pool = {"poolclass": StaticPool}
    elif is_sqlite:
        _create_private(path or "")
    else:
        pool["pool_pre_ping"] = True
    try:
        engine = create_engine(url, connect_args=arguments, hide_parameters=True, **pool)
    except (ModuleNotFoundError, NoSuchModuleError):
        fix = "pip install 'jinfercept[postgresql]', for a URL that begins with postgresql+psycopg://"
        message = "the database of the stored state needs one more package"
        raise ConfigError(message, got=url.get_backend_name(), fix=fix) from None
    if not is_sqlite:
        return engine

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # transactions begin below
        connection.execute("PRAGMA foreign_keys = ON")
        if path is not None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # what is committed survives a power failure
            connection.execute("PRAGMA temp_store = MEMORY")  # the disk of temporary files may be full

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        only_reads = connection.get_execution_options().get(_ONLY_READS)
        # a transaction that reads first could not write later
        connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")

    return engine


def _create_private(path: str) -> None:
    """Create a file that only its user may read, if there is none; SQLite gives its other files the same permissions."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600))
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is no file")
    except (OSError, ValueError) as error:  # ValueError: a text that can be no path
        fix = "give a file in a folder that exists and may be written"
        raise ConfigError("the file of the stored state cannot be written", got=f"{path!r}: {error}", fix=fix) from None
