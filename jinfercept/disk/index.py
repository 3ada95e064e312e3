"""The index of a disk tier: a row of SQLite for every record, and what is remembered between starts.

A row is written once the data is, and deleted before its blocks are used again. What a row says is sealed by a digest, since
SQLite has none.
"""

import hashlib
import json
import os
import sqlite3
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from jinfercept.disk.blocks import BlockRun
from jinfercept.disk.record import Record, RecordData, Root

FORMAT = 1
"""Of the index and the files. What another one wrote is not read."""
_TABLES = """
CREATE TABLE records (
  id INTEGER PRIMARY KEY, parent INTEGER, name BLOB NOT NULL, root BLOB NOT NULL, token_bytes INTEGER NOT NULL,
  kv_bytes INTEGER NOT NULL, tokens BLOB NOT NULL, blocks BLOB NOT NULL, checksums BLOB NOT NULL, stamp BLOB NOT NULL,
  first INTEGER NOT NULL, seal BLOB NOT NULL, used REAL NOT NULL
);
CREATE TABLE remembered (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_COLUMNS = "parent, name, root, token_bytes, kv_bytes, tokens, blocks, checksums, stamp, first, seal"
_TROUBLE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
)
_INSERT = f"INSERT INTO records ({_COLUMNS}, used) VALUES ({'?, ' * (_COLUMNS.count(',') + 1)}?)"
_UPDATE = f"UPDATE records SET {_COLUMNS.replace(',', ' = ?,')} = ? WHERE id = ?"


class IndexRow(NamedTuple):
    """A record as the index has it, its seal unbroken.

    Attributes:
        id, parent: of the row, and of the row that it continues; None for a root.
        name: see `record`.
        used: Unix time of its last use.
    """

    id: int
    parent: int | None
    name: bytes
    root: Root
    tokens: bytes
    extent: RecordData
    used: float


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
        for values in self._connection.execute(f"SELECT id, {_COLUMNS}, used FROM records"):
            row = _read(values)
            if row is not None:
                yield row

    def write(
        self, added: Sequence[Record], changed: Sequence[Record], used: Mapping[int, float], now_s: float
    ) -> None:
        """Add rows, each after its parent's, and change others, in one transaction.

        Args:
            added: records without a row; they get the ids of their rows.
            changed: records with a row, whose parent or pages have changed.
            used: times of last use by row.
            now_s: the time of last use of those that are added.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for record in added:
                cursor = self._connection.execute(_INSERT, (*_values(record), now_s))
                record.id = cursor.lastrowid or 0
            for record in changed:
                self._connection.execute(_UPDATE, (*_values(record), record.id))
            times = [(used_s, row) for row, used_s in used.items()]
            self._connection.executemany("UPDATE records SET used = ? WHERE id = ?", times)
            self._connection.execute("COMMIT")
        except BaseException:
            for record in added:
                record.id = 0
            self._undo()
            raise

    def delete(self, rows: Iterable[int]) -> None:
        """Delete rows, in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany("DELETE FROM records WHERE id = ?", [(row,) for row in rows])
            self._connection.execute("COMMIT")
        except BaseException:
            self._undo()
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

    def _undo(self) -> None:
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

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
    extent, root, parent = record.extent, record.root, record.parent
    blocks = array("Q", [number for run in extent.runs for number in run]).tobytes()
    about = (record.name, root.digest, root.token_bytes, root.kv_bytes)
    where = (blocks, extent.checksums.tobytes(), extent.stamp, extent.first)
    return (None if parent is None else parent.id, *about, record.tokens, *where, _seal(*about, *where))


def _read(values: tuple[Any, ...]) -> IndexRow | None:
    """The row of these columns; None if its seal is broken."""
    row, parent, name, digest, token_bytes, kv_bytes, tokens, blocks, checksums, stamp, first, seal, used_s = values
    try:
        if _seal(name, digest, token_bytes, kv_bytes, blocks, checksums, stamp, first) != seal:
            return None
        numbers = array("Q", blocks)
        runs = tuple(BlockRun(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
        extent = RecordData(runs, array("I", checksums), stamp, first)
        if not isinstance(tokens, bytes) or token_bytes < 1:
            return None
        return IndexRow(row, parent, name, Root(digest, token_bytes, kv_bytes), tokens, extent, float(used_s))
    except (TypeError, ValueError):  # values of other types than were written
        return None


def _seal(*values: bytes | int) -> bytes:
    """Digest of a row's columns but for the tokens, of which the name is a digest, and the parent, which the name implies."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
