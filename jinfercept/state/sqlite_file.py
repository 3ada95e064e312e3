"""SQLite in a file or in memory: its engine, and room on the disk for deletions.

SQLite writes every change to a log (WAL) first, a deletion too, and deleted rows leave free pages inside the file. So on a full
disk nothing could be deleted: `SpareRoom` is returned to the file system meanwhile. The log is short, so that the room is
enough to move it into the file.
"""

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from jinfercept.errors import ConfigError

ONLY_READS = "jinfercept_only_reads"
"""Execution option of connections that write nothing."""
_LOG_PAGES = 128
"""Pages of the log after which it is moved into the file."""
_LOG_BYTES = 2**20
"""Bytes to which a longer log is cut."""
_SPARE_BYTES = [2**power for power in range(20, 15, -1)]
"""Bytes of spare room, the first for which there is room: twice those of the log, or less."""
_BUSY_MS = 100
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""Errors of a full disk, of a quota, and of a limit of the size of files."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: DBAPIError) -> bool:
    """Whether a database has no room on its disk."""
    return getattr(error.orig, "sqlite_errorcode", 0) in _FULL or getattr(error.orig, "sqlstate", "") == "53100"


def is_damaged(error: DBAPIError) -> bool:
    """Whether a file is no database any more."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def sqlite_engine(url: URL, timeout_s: float, num_connections: int) -> Engine:
    """The engine of a file, which is created if there is none, or of a database in memory.

    Raises:
        ConfigError: the file cannot be written.
    """
    memory = url.database is None
    opened = None if url.database is None else _create_private(url.database)
    arguments = {"check_same_thread": False, "timeout": timeout_s}
    engine = (
        create_engine(url, connect_args=arguments, hide_parameters=True, poolclass=StaticPool)
        if memory
        else create_engine(
            url,
            connect_args=arguments,
            hide_parameters=True,
            pool_size=num_connections,
            max_overflow=0,
            pool_timeout=timeout_s,
        )
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # transactions begin below
        connection.execute("PRAGMA foreign_keys = ON")
        if not memory:
            _configure_file(connection)

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        if url.database is not None and _identity(url.database) != opened:  # SQLite would write into the moved file
            gone = sqlite3.OperationalError(f"{url.database} was moved or replaced: move it back, or start again")
            raise OperationalError("BEGIN", None, gone)
        reads = connection.get_execution_options().get(ONLY_READS)
        connection.exec_driver_sql(
            "BEGIN" if reads else "BEGIN IMMEDIATE"
        )  # one that reads first could not write later

    return engine


def _configure_file(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # what is committed survives a power failure
    connection.execute("PRAGMA temp_store = MEMORY")  # the disk of temporary files may be full
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    if sys.platform == "win32":  # has no limit of the size of files
        return
    import resource

    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes != resource.RLIM_INFINITY:  # pages beyond it could not leave the log
        [page_bytes] = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, most_bytes // page_bytes)}")


@final
class SpareRoom:
    """Room on the disk of a file of SQLite, which is free while rows are deleted from a full one.

    It is a file without a name, so that nothing of it is left when the process ends.
    """

    def __init__(self, engine: Engine, path: str) -> None:
        self._engine, self._path, self._folder = engine, path, Path(path).parent
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._num_bytes = 0
        free = shutil.disk_usage(self._folder).free
        self._sizes = [size for size in _SPARE_BYTES if 2 * size <= free] or _SPARE_BYTES[-1:]

    def hold(self) -> bool:
        """Take as much room as there is, up to half of what was free at the start; whether any is held."""
        with self._lock:
            return self._hold()

    def close(self) -> None:
        """Return the room for good."""
        with self._lock:
            self._release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return the room to the file system for work, and take it again afterwards."""
        with self._lock:
            self._release()
            self.shorten_log()
            try:
                yield
            finally:
                self.shorten_log()
                self._hold()

    def shorten_log(self) -> None:
        """Move the log into the file and cut it, if there is room for that and no long read holds it up."""
        with suppress(sqlite3.Error, SQLAlchemyError):
            pooled = self._engine.raw_connection()
            try:
                connection: Any = pooled.driver_connection
                [before_ms] = connection.execute("PRAGMA busy_timeout").fetchone()
                connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    connection.execute(f"PRAGMA busy_timeout = {before_ms}")
            finally:
                pooled.close()

    def check_growth(self, session: Session) -> None:
        """Check, at the end of a transaction, that the file can take over the new pages of the log, and room is left to delete.

        Raises:
            OperationalError: as SQLite's own of a full disk.
        """
        query = session.connection().exec_driver_sql
        num_bytes = query("PRAGMA page_count").scalar_one() * query("PRAGMA page_size").scalar_one()
        grows = num_bytes - os.path.getsize(self._path)
        if grows > 0 and shutil.disk_usage(self._folder).free < 2 * grows + self._sizes[0]:
            error = sqlite3.OperationalError("database or disk is almost full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError("COMMIT", None, error)

    def _hold(self) -> bool:
        for num_bytes in self._sizes:
            if num_bytes <= self._num_bytes:
                break
            self._release()
            with suppress(OSError):
                self._write(num_bytes)
                break
        return self._num_bytes > 0

    def _write(self, num_bytes: int) -> None:
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=self._folder, buffering=0))
            if file.write(os.urandom(num_bytes)) != num_bytes:  # a file system that compresses must not find it small
                raise OSError("only a part was written")
            os.fsync(file.fileno())
            self._held, self._num_bytes = stack.pop_all(), num_bytes

    def _release(self) -> None:
        self._held.close()
        self._num_bytes = 0


def deleted_lean[T](session: Session, work: Callable[[Session], T]) -> T:
    """The result of work that does not overwrite what it deletes, for which the log would need as much room."""
    connection = session.connection()
    before = connection.exec_driver_sql("PRAGMA secure_delete").scalar_one()
    connection.exec_driver_sql("PRAGMA secure_delete = FAST")
    try:
        return work(session)
    finally:
        connection.exec_driver_sql(f"PRAGMA secure_delete = {('OFF', 'ON', 'FAST')[before]}")


def _create_private(path: str) -> tuple[int, int] | None:
    """Create a file that only its user may read, if there is none; SQLite gives its other files the same permissions.

    Returns:
        Its identity.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600))
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is no file")
        return _identity(path)
    except (OSError, ValueError) as error:  # ValueError: a text that can be no path
        fix = "give a file in a folder that exists and may be written"
        raise ConfigError("the file of the stored state cannot be written", got=f"{path!r}: {error}", fix=fix) from None


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
