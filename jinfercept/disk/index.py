"""The index of a disk tier: a row of SQLite for every record, and what is remembered between starts.

A row is written once the data is, and deleted before its file. What a row says is sealed by a digest, since SQLite has none.
"""

import hashlib
import json
import os
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from jinfercept.disk.record import IndexRow, Record, RecordData, Root

FORMAT = 2
"""Of the index and the files. What another one wrote is not read."""
_TABLES = """
CREATE TABLE records (
  id INTEGER PRIMARY KEY, parent INTEGER, start INTEGER NOT NULL, tokens BLOB NOT NULL, name BLOB NOT NULL,
  root BLOB NOT NULL, token_bytes INTEGER NOT NULL, kv_bytes INTEGER NOT NULL, file TEXT NOT NULL, checksums BLOB NOT NULL,
  seal BLOB NOT NULL, used REAL NOT NULL
);
CREATE TABLE remembered (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_COLUMNS = "parent, start, tokens, name, root, token_bytes, kv_bytes, file, checksums, seal, used"
_TROUBLE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
)
_INSERT = f"INSERT INTO records ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"


@final
class Index:
    """An open index. Use it from one thread at a time.

    Args:
        path: of its file, which is created if it does not exist.

    Raises:
        OSError: the file cannot be written.
        sqlite3.Error: it cannot be used; `is_damage` says whether it is to be removed.
    """

    def __init__(self, path: Path) -> None:
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )  # SQLite's other files get its permissions
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._configure()
        except BaseException:
            self._connection.close()
            raise

    def rows(self) -> Iterable[IndexRow]:
        """Every row whose seal is unbroken."""
        for values in self._connection.execute(f"SELECT id, {_COLUMNS} FROM records"):
            row = _read(values)
            if row is not None:
                yield row

    def write(self, added: Record | None, used: Mapping[int, float], now_s: float) -> None:
        """Add a row, and change others, in one transaction.

        Args:
            added: a record without a row, used now; it gets the id of its row.
            used: times of last use by row.
        """
        with self._transaction():
            times = [(used_s, row) for row, used_s in used.items()]
            self._connection.executemany("UPDATE records SET used = ? WHERE id = ?", times)
            row = None if added is None else self._connection.execute(_INSERT, (*_values(added), now_s)).lastrowid
        if added is not None:
            added.id = row or 0

    def delete(self, rows: Iterable[int]) -> None:
        """Delete rows, in one transaction."""
        with self._transaction():
            self._connection.executemany("DELETE FROM records WHERE id = ?", [(row,) for row in rows])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            raise

    def remembered(self, key: str) -> Any:
        """What was remembered under a name; None if nothing was, or it is damaged."""
        row = self._connection.execute("SELECT value FROM remembered WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None else json.loads(row[0])
        except (ValueError, TypeError):
            return None

    def remember(self, key: str, value: Any) -> None:
        """Keep a JSON value for later starts."""
        self._connection.execute("INSERT OR REPLACE INTO remembered VALUES (?, ?)", (key, json.dumps(value)))

    def close(self) -> None:
        self._connection.close()

    def _configure(self) -> None:
        run = self._connection.execute
        run(
            "PRAGMA locking_mode = EXCLUSIVE"
        )  # so that the log needs no shared memory, which network file systems lack
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA temp_store = MEMORY")
        [version] = run("PRAGMA user_version").fetchone()
        [tables] = run("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and version != FORMAT:
            raise sqlite3.DatabaseError(f"format {version}, and this program reads format {FORMAT}")
        [health] = run("PRAGMA quick_check(1)").fetchone()
        if health != "ok":
            raise sqlite3.DatabaseError(health)
        if not tables:
            self._connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an index is damaged or of another format, rather than locked, or on a disk that is full or fails."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _TROUBLE


def _values(record: Record) -> tuple[Any, ...]:
    """What a row has beside its id and its time, in the order of the columns."""
    (file, checksums), root, parent = record.data, record.root, record.parent
    sealed = record.name, root.digest, root.token_bytes, root.kv_bytes, file.encode(), checksums.tobytes()
    return (
        None if parent is None or parent.parent is None else parent.id,
        record.start,
        record.tokens,
        *sealed[:4],
        file,
        sealed[5],
        _seal(*sealed),
    )


def _read(values: tuple[Any, ...]) -> IndexRow | None:
    """The row of these columns; None if its seal is broken."""
    row, parent, start, tokens, name, digest, token_bytes, kv_bytes, file, checksums, seal, used_s = values
    try:
        if _seal(name, digest, token_bytes, kv_bytes, file.encode(), checksums) != seal:
            return None
        root, data = Root(digest, token_bytes, kv_bytes), RecordData(file, array("I", checksums))
        if not isinstance(tokens, bytes) or not isinstance(start, int) or token_bytes < 1:
            return None
        return IndexRow(row, parent, start, name, root, tokens, data, float(used_s))
    except (AttributeError, TypeError, ValueError):  # values of other types than were written
        return None


def _seal(*values: bytes | int) -> bytes:
    """Digest of a row's columns but for tokens, start and parent, of which the name is a digest."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
