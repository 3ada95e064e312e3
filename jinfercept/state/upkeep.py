"""Heartbeats of servers, and what lost servers, expiry and limits leave to be cleaned up."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from jinfercept.state.queries import ServerClock, clock, is_live, replace_row, take_turns
from jinfercept.state.tables import OPEN, ConversationRow, InboxRow, ResponseRow, ServerRow

_AT_ONCE = 500
_MOST_DELETED = 2000
"""Rows that one sweep removes, so that its transaction is short."""
_LOCK = 0x6A737770
_FORGET_S = 3600.0
"""Seconds after which the row of a lost server is removed."""


class Heartbeat(NamedTuple):
    """The news of a server's heartbeat.

    Attributes:
        open: ids of its responses that are open in the database.
        cancelled: those of which a client has requested the end.
    """

    open: frozenset[str]
    cancelled: frozenset[str]


class StateLimits(NamedTuple):
    """Maximum counted bytes and responses of all tenants, and of one; None: no separate limit."""

    most_bytes: int
    most_bytes_of_tenant: int | None
    most_responses: int | None = None
    most_responses_of_tenant: int | None = None


def beat(session: Session, server: ServerClock, generated: Container[str]) -> Heartbeat:
    """Record that a server lives, and fail the responses that it has lost.

    Args:
        mine: ids of the responses that the server generates, read during the call.
    """
    replace_row(session, ServerRow, {"id": server.server_id, "seen_at": clock(session, shared=True)})
    columns = select(ResponseRow.id, ResponseRow.is_cancelled)
    of_server = ResponseRow.server_id == server.server_id, ResponseRow.status.in_(OPEN)
    rows = session.execute(columns.where(*of_server)).all()
    if lost := [row_id for row_id, _ in rows if row_id not in generated]:
        session.execute(update(ResponseRow).where(ResponseRow.id.in_(lost), *of_server).values(status="failed"))
    turns = session.scalars(select(ConversationRow.turn_id).where(ConversationRow.turn_server_id == server.server_id))
    if lost_turns := [turn_id for turn_id in turns if turn_id is not None and turn_id not in generated]:
        _free_turns(session, ConversationRow.turn_id.in_(lost_turns))
    return Heartbeat(frozenset(row_id for row_id, _ in rows), frozenset(row_id for row_id, ended in rows if ended))


def leave(session: Session, server: ServerClock) -> None:
    """Record that a server ends: what it has not settled fails at once."""
    of_server = ResponseRow.server_id == server.server_id, ResponseRow.status.in_(OPEN)
    session.execute(update(ResponseRow).where(*of_server).values(status="failed"))
    _free_turns(session, ConversationRow.turn_server_id == server.server_id)
    session.execute(delete(InboxRow).where(InboxRow.server_id == server.server_id))
    session.execute(delete(ServerRow).where(ServerRow.id == server.server_id))


def sweep(session: Session, server: ServerClock, limits: StateLimits) -> bool:
    """Fail what lost servers have left, and remove what has expired or is beyond the limits; whether more is to be removed."""
    if not take_turns(session, _LOCK):
        return False
    now = clock(session)
    _close_lost(session, now, server)
    more = _remove_conversations(session, now)
    more |= _shrink(session, limits)
    return _remove_responses(session, now) or more


def excess(sizes: Mapping[str, int], most: int, most_of_tenant: int | None) -> dict[str, int]:
    """The bytes that each tenant gives back, so that all fits: those that hold the most give back, down to an equal level.

    Args:
        sizes: bytes, or responses, by tenant.
        most, most_of_tenant: limits of all, and of one; None: no separate limit.
    """
    capped = {tenant: size if most_of_tenant is None else min(size, most_of_tenant) for tenant, size in sizes.items()}
    level, room = most, most
    for rest, size in zip(range(len(capped), 0, -1), sorted(capped.values()), strict=True):
        level = room // rest
        if size > level:
            break
        room -= size
    else:
        level = most
    over = {tenant: size - min(capped[tenant], level) for tenant, size in sizes.items()}
    return {tenant: num_bytes for tenant, num_bytes in over.items() if num_bytes > 0}


def _close_lost(session: Session, now: float, server: ServerClock) -> None:
    """A server that sweeps lives, however long ago its heartbeat was."""

    def is_lost(owner: InstrumentedAttribute[Any]) -> ColumnElement[bool]:
        return (owner != server.server_id) & ~is_live(owner, now, server.lost_s)

    lost = ResponseRow.status.in_(OPEN), is_lost(ResponseRow.server_id)
    session.execute(update(ResponseRow).where(*lost).values(status="failed"))
    _free_turns(session, ConversationRow.turn_server_id.is_not(None) & is_lost(ConversationRow.turn_server_id))
    session.execute(delete(InboxRow).where(is_lost(InboxRow.server_id)))
    session.execute(delete(ServerRow).where(ServerRow.seen_at < now - server.lost_s - _FORGET_S))


def _free_turns(session: Session, condition: ColumnElement[bool]) -> None:
    session.execute(update(ConversationRow).where(condition).values(turn_id=None, turn_server_id=None))


def _remove_conversations(session: Session, now: float) -> bool:
    """Remove conversations that have expired; whether more may be left."""
    expired = ConversationRow.expires_at <= now, ConversationRow.turn_id.is_(None)
    expired_ids = session.scalars(select(ConversationRow.id).where(*expired).limit(_AT_ONCE)).all()
    session.execute(delete(ConversationRow).where(ConversationRow.id.in_(expired_ids), *expired))
    return len(expired_ids) == _AT_ONCE


def _shrink(session: Session, limits: StateLimits) -> bool:
    """Delete the oldest responses and conversations of tenants that hold too much; whether more are to be deleted."""
    sizes: dict[str, int] = {}
    for table in (ResponseRow, ConversationRow):
        for tenant, size in session.execute(select(table.tenant, func.sum(table.num_bytes)).group_by(table.tenant)):
            sizes[tenant] = sizes.get(tenant, 0) + int(size)
    over = excess(sizes, limits.most_bytes, limits.most_bytes_of_tenant)
    has_more = [_delete_oldest(session, tenant, num_bytes) for tenant, num_bytes in over.items()]
    if limits.most_responses is not None:
        count = select(ResponseRow.tenant, func.count()).where(~ResponseRow.is_deleted).group_by(ResponseRow.tenant)
        numbers = dict(session.execute(count).all())
        for tenant, number in excess(numbers, limits.most_responses, limits.most_responses_of_tenant).items():
            final = ResponseRow.tenant == tenant, ResponseRow.status.not_in(OPEN), ~ResponseRow.is_deleted
            oldest = select(ResponseRow.id).where(*final).order_by(ResponseRow.created_at).limit(min(number, _AT_ONCE))
            deleted = session.scalars(oldest).all()
            session.execute(update(ResponseRow).where(ResponseRow.id.in_(deleted)).values(is_deleted=True))
            has_more.append(len(deleted) == _AT_ONCE)
    return any(has_more)


def _delete_oldest(session: Session, tenant: str, num_bytes: int) -> bool:
    final = ResponseRow.status.not_in(OPEN), ~ResponseRow.is_deleted
    at = ResponseRow.created_at
    responses = select(at, ResponseRow.id, ResponseRow.num_bytes).where(ResponseRow.tenant == tenant, *final)
    changed = ConversationRow.changed_at
    idle = ConversationRow.tenant == tenant, ConversationRow.turn_id.is_(None)
    conversations = select(changed, ConversationRow.id, ConversationRow.num_bytes).where(*idle)
    oldest = [*session.execute(responses.order_by(at).limit(_AT_ONCE))]
    oldest += session.execute(conversations.order_by(changed).limit(_AT_ONCE))
    chosen: list[str] = []
    for _, row_id, size in sorted(oldest)[:_AT_ONCE]:  # the oldest of both tables
        if num_bytes <= 0:
            break
        chosen.append(row_id)
        num_bytes -= size
    session.execute(update(ResponseRow).where(ResponseRow.id.in_(chosen)).values(is_deleted=True))
    session.execute(delete(ConversationRow).where(ConversationRow.id.in_(chosen), *idle))
    return num_bytes > 0 and len(chosen) == _AT_ONCE


def _remove_responses(session: Session, now: float) -> bool:
    """Remove responses that are deleted or expired, the last of a chain first; whether more may be left."""
    num_deleted = 0
    child = aliased(ResponseRow)
    unseen = (ResponseRow.is_deleted | (ResponseRow.expires_at <= now)) & ResponseRow.status.not_in(OPEN)
    unneeded = ~exists().where(child.previous_id == ResponseRow.id)
    query = select(ResponseRow.id, ResponseRow.previous_id).where(unseen, unneeded)
    rows = session.execute(query.limit(_AT_ONCE)).all()
    while rows and num_deleted < _MOST_DELETED:
        session.execute(delete(ResponseRow).where(ResponseRow.id.in_([row_id for row_id, _ in rows])))
        num_deleted += len(rows)
        earlier = sorted({previous_id for _, previous_id in rows if previous_id is not None})
        rows = session.execute(query.where(ResponseRow.id.in_(earlier))).all() if earlier else []
        rows = rows or session.execute(query.limit(_AT_ONCE)).all()
    return num_deleted >= _MOST_DELETED
