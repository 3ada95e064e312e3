"""Parts of queries that several tables share."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from jinfercept.protocols.encoding import encode
from jinfercept.protocols.errors import ApiError
from jinfercept.state.tables import ServerRow, StateTable, digest
from jinfercept.state.trusted_clock import TrustedClock

MOST_LOADED_BYTES = 2**26
"""Maximum bytes of documents that one request loads."""
ROW_BYTES = 1024
"""Bytes that are counted for a row besides its documents."""
ITEM_BYTES = 256
"""Bytes that are counted for an item besides its document."""
_CLOCK = "clock"
"""Id of a row of the servers: the trusted time of the last heartbeat of any."""
_AT_ONCE = 1000
"""Rows that one statement inserts."""


class ServerClock(NamedTuple):
    """A server, and when it takes others for lost.

    Attributes:
        lost_s: seconds without a heartbeat after which a server is lost.
    """

    server_id: str
    lost_s: float


def clock(session: Session, *, shared: bool = False) -> float:
    """The trusted time (`TrustedClock`) in seconds since 1970: rows expire, and servers are lost, by it.

    Args:
        shared: read what other servers trust, and have them read this.
    """
    trusted: TrustedClock = session.info["clock"]
    stored = select(ServerRow.seen_at).where(ServerRow.id == _CLOCK)
    stored_s = session.scalar(stored) if shared or not trusted.has_begun else None
    now = trusted.read(wall_clock(session), stored_s)
    if shared:
        replace_row(session, ServerRow, {"id": _CLOCK, "seen_at": now})
    return now


def wall_clock(session: Session) -> float:
    """The time in seconds since 1970: PostgreSQL's own, so that clocks of servers may differ; this machine's for SQLite."""
    if _is_postgresql(session):
        return float(session.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)
    return time.time()


def document(value: Any) -> tuple[str, int]:
    """A value as JSON, and its bytes."""
    encoded = encode(value)
    return encoded.decode(), len(encoded)


def is_live(server_id: InstrumentedAttribute[Any], now: float, lost_s: float) -> ColumnElement[bool]:
    """Whether the server of a column has had a heartbeat lately."""
    return exists().where(ServerRow.id == server_id, ServerRow.seen_at > now - lost_s)


def insert_new(session: Session, table: type[StateTable], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; those whose primary keys exist are left as they are."""
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    for begin in range(0, len(rows), _AT_ONCE):
        session.execute(make(table).on_conflict_do_nothing(), rows[begin : begin + _AT_ONCE])


def replace_row(session: Session, table: type[StateTable], row: Mapping[str, Any]) -> None:
    """Insert a row with the primary key `id`, or update the one that exists."""
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    session.execute(make(table).values(**row).on_conflict_do_update(index_elements=["id"], set_=dict(row)))


def take_turns(session: Session, lock: int) -> bool:
    """Whether no other transaction of this kind runs; if so, none begins before the end of this one.

    Args:
        lock: number of the kind.
    """
    if not _is_postgresql(session):
        return True  # all that write take turns
    return bool(session.scalar(select(func.pg_try_advisory_xact_lock(lock))))


def item_rows(tenant: str, first: int, item_ids: Sequence[str], **more: str) -> list[dict[str, Any]]:
    """Rows of an index of items; `more` are the columns that they share."""
    return [
        {"place": place, "tenant": tenant, "item": digest(item_id), **more}
        for place, item_id in enumerate(item_ids, start=first)
    ]


def check_loaded(num_bytes: int, param: str) -> None:
    """Raise 400 if a request would load too many bytes.

    Args:
        param: field that names what is loaded.
    """
    if num_bytes > MOST_LOADED_BYTES:
        message = f"the stored conversation has {num_bytes} bytes; at most {MOST_LOADED_BYTES} can be loaded"
        raise ApiError.bad(message, param, "context_length_exceeded")


def _is_postgresql(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"
