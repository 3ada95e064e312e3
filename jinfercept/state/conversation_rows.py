"""Rows of conversations and their items, found with their tenant only. A conversation has one response at a time."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.orm import Session

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item
from jinfercept.protocols.openai.response_schemas import MAX_ITEMS
from jinfercept.state.queries import (
    ITEM_BYTES,
    ROW_BYTES,
    ServerClock,
    check_loaded,
    clock,
    document,
    insert_new,
    is_live,
    item_rows,
    wall_clock,
)
from jinfercept.state.tables import ConversationItemRow, ConversationRow, digest

_CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}")
_PAGE_BYTES = 2**24
"""Bytes of items after which a page ends, whatever its limit."""


class StoredConversation(NamedTuple):
    """A conversation without its items; `created_at` in seconds since 1970."""

    id: str
    created_at: float
    metadata: dict[str, str]


class ConversationTurn(NamedTuple):
    """The part of a conversation that a response in it needs.

    Attributes:
        bodies: documents of the conversation's items before the turn.
    """

    bodies: Sequence[str]
    last_response_id: str | None

    @property
    def items(self) -> list[Item]:
        """The items before the turn. Slow."""
        return [json.loads(body) for body in self.bodies]


class ItemPage(NamedTuple):
    """A page of items.

    Attributes:
        bodies: their documents.
        first_id, last_id: ids of the first and the last item; None if there is none.
        has_more: whether more items follow.
    """

    bodies: Sequence[str]
    first_id: str | None
    last_id: str | None
    has_more: bool


def create_conversation(
    session: Session, tenant: str, conversation: StoredConversation, items: Sequence[Item], ttl_s: float
) -> int:
    """Insert a conversation; returns its counted bytes."""
    now, (about, about_bytes) = wall_clock(session), document(conversation.metadata)
    row = {
        "id": conversation.id,
        "tenant": tenant,
        "created_at": conversation.created_at,
        "changed_at": now,
        "expires_at": now + ttl_s,
        "num_items": 0,
        "num_bytes": ROW_BYTES + about_bytes,
        "next_place": 0,
        "about": about,
    }
    insert_new(session, ConversationRow, [row])
    return row["num_bytes"] + add_items(session, tenant, conversation.id, items, conversation.id, ttl_s)


def read_conversation(session: Session, tenant: str, conversation_id: str) -> StoredConversation:
    """A conversation of a tenant. Raises 404."""
    row = _row(session, conversation_id, tenant)
    return StoredConversation(row.id, row.created_at, json.loads(row.about))


def change_metadata(
    session: Session, tenant: str, conversation_id: str, metadata: dict[str, str], ttl_s: float
) -> StoredConversation:
    """The conversation with new metadata. Raises 404."""
    row, now, (about, about_bytes) = (
        _row(session, conversation_id, tenant, lock=True),
        wall_clock(session),
        document(metadata),
    )
    changed = {"about": about, "changed_at": now, "expires_at": now + ttl_s}
    num_bytes = row.num_bytes + about_bytes - len(row.about.encode())
    session.execute(update(ConversationRow).where(ConversationRow.id == row.id).values(num_bytes=num_bytes, **changed))
    return StoredConversation(row.id, row.created_at, metadata)


def delete_conversation(session: Session, tenant: str, conversation_id: str) -> None:
    """Delete a conversation and its items; its responses remain. Deleting it twice has the effect of once."""
    if _CONVERSATION_ID.fullmatch(conversation_id):
        is_wanted = ConversationRow.id == conversation_id, ConversationRow.tenant == tenant
        session.execute(delete(ConversationRow).where(*is_wanted))


def add_items(
    session: Session, tenant: str, conversation_id: str, items: Sequence[Item], write: str, ttl_s: float
) -> int:
    """Add items to a conversation; returns their counted bytes.

    Args:
        write: unique name of this change.

    Raises:
        ApiError: 404; 409 while a response is generated in it; 400 if it would have too many items.
    """
    row = _row(session, conversation_id, tenant, lock=True)
    if row.last_write == write:
        return 0  # an earlier attempt was committed
    if row.turn_id is not None:
        raise conversation_locked()
    _check_length(row.num_items, len(items), "items")
    return _append(session, row, items, ttl_s, {"last_write": write})


def list_items(
    session: Session, tenant: str, conversation_id: str, limit: int, descending: bool, after: str | None
) -> ItemPage:
    """A page of items. It has fewer than `limit` if they are long.

    Args:
        after: id of the item before the page; None: the page is the first one.

    Raises:
        ApiError: 404 for the conversation, 400 for `after`.
    """
    row = _row(session, conversation_id, tenant)
    place, order = ConversationItemRow.place, ConversationItemRow.place.desc()
    conditions: list[ColumnElement[bool]] = [ConversationItemRow.conversation_id == row.id]
    if after is not None:
        at = session.scalar(select(func.max(place)).where(*conditions, ConversationItemRow.item == digest(after)))
        if at is None:
            raise ApiError.bad(f"no item of this list has the id {after[:200]!r}", "after")
        conditions.append(place < at if descending else place > at)
    sizes = session.execute(
        select(place, ConversationItemRow.num_bytes)
        .where(*conditions)
        .order_by(order if descending else place)
        .limit(limit + 1)
    ).all()
    shown: list[int] = []
    num_bytes = 0
    for item_place, size in sizes[:limit]:
        if num_bytes < _PAGE_BYTES:
            shown.append(item_place)
            num_bytes += size
    columns = select(place, ConversationItemRow.body).where(conditions[0], place.in_(shown))
    body_at = dict(session.execute(columns).all())
    bodies = [body_at[item_place] for item_place in shown]
    first_id, last_id = (json.loads(bodies[0])["id"], json.loads(bodies[-1])["id"]) if bodies else (None, None)
    return ItemPage(bodies, first_id, last_id, len(sizes) > len(shown))


def read_item(session: Session, tenant: str, conversation_id: str, item_id: str) -> str:
    """Document of an item of a conversation. Raises 404."""
    row = _row(session, conversation_id, tenant)
    are_wanted = ConversationItemRow.conversation_id == row.id, ConversationItemRow.item == digest(item_id)
    body = session.scalar(
        select(ConversationItemRow.body).where(*are_wanted).order_by(ConversationItemRow.place).limit(1)
    )
    if body is None:
        raise ApiError(404, f"no item of this conversation has the id {item_id[:200]!r}", code="item_not_found")
    return body


def delete_item(session: Session, tenant: str, conversation_id: str, item_id: str, ttl_s: float) -> StoredConversation:
    """Delete the items of an id; returns the conversation. Deleting twice has the effect of once.

    Raises:
        ApiError: 404 for the conversation; 409 while a response is generated in it.
    """
    row, now = _row(session, conversation_id, tenant, lock=True), wall_clock(session)
    if row.turn_id is not None:
        raise conversation_locked()
    are_wanted = ConversationItemRow.conversation_id == row.id, ConversationItemRow.item == digest(item_id)
    sizes = list(session.scalars(select(ConversationItemRow.num_bytes).where(*are_wanted)))
    session.execute(delete(ConversationItemRow).where(*are_wanted))
    session.execute(
        update(ConversationRow)
        .where(ConversationRow.id == row.id)
        .values(
            num_items=ConversationRow.num_items - len(sizes),
            num_bytes=ConversationRow.num_bytes - sum(sizes) - ITEM_BYTES * len(sizes),
            changed_at=now,
            expires_at=now + ttl_s,
            last_response_id=None,
        )
    )
    return StoredConversation(row.id, row.created_at, json.loads(row.about))


def begin_turn(
    session: Session, server: ServerClock, conversation_id: str, tenant: str, response_id: str, number: int
) -> ConversationTurn:
    """Begin a response in a conversation; no other one begins before it ends.

    Args:
        number: of the response's own input items.

    Raises:
        ApiError: 404; 409 if another response is generated in it; 400 if it is too long.
    """
    row, now = _row(session, conversation_id, tenant, lock=True), clock(session)
    live = row.turn_server_id == server.server_id or session.scalar(
        select(is_live(ConversationRow.turn_server_id, now, server.lost_s)).where(ConversationRow.id == row.id)
    )
    if row.turn_id not in (None, response_id) and live:
        raise conversation_locked()
    _check_length(row.num_items, number, "input")
    check_loaded(row.num_bytes, "conversation")
    turn = {"turn_id": response_id, "turn_server_id": server.server_id}
    session.execute(update(ConversationRow).where(ConversationRow.id == row.id).values(**turn))
    bodies = session.scalars(
        select(ConversationItemRow.body)
        .where(ConversationItemRow.conversation_id == row.id)
        .order_by(ConversationItemRow.place)
    )
    return ConversationTurn(bodies.all(), row.last_response_id)


def end_turn(
    session: Session, conversation_id: str, tenant: str, response_id: str, items: Sequence[Item], ttl_s: float
) -> int | None:
    """Add the items of a response to its conversation, and end its turn; None if another response has begun meanwhile.

    Returns the counted bytes of the items; 0, without effect, if the conversation is deleted.

    Args:
        items: input and output of the response; none if it has failed.
    """
    is_wanted = ConversationRow.id == conversation_id, ConversationRow.tenant == tenant
    row = session.scalars(select(ConversationRow).where(*is_wanted).with_for_update()).one_or_none()
    if row is None:
        return 0
    if row.turn_id != response_id:
        return 0 if response_id in (row.last_write, row.last_response_id) else None  # an earlier attempt was committed
    free = {"turn_id": None, "turn_server_id": None, "last_write": response_id}
    return _append(session, row, items, ttl_s, free | ({"last_response_id": response_id} if items else {}))


def conversation_locked() -> ApiError:
    """Status 409, while a response is generated in a conversation. OpenAI's clients retry after it."""
    message = "another response is being generated in this conversation; fix: retry when it has ended"
    return ApiError(409, message, param="conversation", code="conversation_locked", headers={"Retry-After": "1"})


def _row(session: Session, conversation_id: str, tenant: str, *, lock: bool = False) -> ConversationRow:
    if _CONVERSATION_ID.fullmatch(conversation_id):
        is_wanted = ConversationRow.id == conversation_id, ConversationRow.tenant == tenant
        query = select(ConversationRow).where(
            *is_wanted, or_(ConversationRow.expires_at > clock(session), ConversationRow.turn_id.is_not(None))
        )
        row = session.scalars(query.with_for_update() if lock else query).one_or_none()
        if row is not None:
            return row
    message = f"no conversation has the id {conversation_id[:200]!r}"
    raise ApiError(404, message, param="conversation", code="conversation_not_found")


def _append(session: Session, row: ConversationRow, items: Sequence[Item], ttl_s: float, more: dict[str, Any]) -> int:
    now, first = wall_clock(session), row.next_place
    bodies = [document(item) for item in items]
    rows = item_rows(row.tenant, first, [item["id"] for item in items], conversation_id=row.id)
    sized = [place | {"body": body, "num_bytes": size} for place, (body, size) in zip(rows, bodies, strict=True)]
    insert_new(session, ConversationItemRow, sized)
    num_bytes = sum(size for _, size in bodies) + ITEM_BYTES * len(items)
    changed = {"changed_at": now, "expires_at": now + ttl_s, "next_place": first + len(items)}
    session.execute(
        update(ConversationRow)
        .where(ConversationRow.id == row.id)
        .values(
            num_items=ConversationRow.num_items + len(items),
            num_bytes=ConversationRow.num_bytes + num_bytes,
            **changed,
            **more,
        )
    )
    return num_bytes


def _check_length(num_before: int, number: int, param: str) -> None:
    if num_before + number > MAX_ITEMS:
        message = (
            f"a conversation has at most {MAX_ITEMS} items; this one has {num_before}, and {number} would be added"
        )
        raise ApiError.bad(message, param, "too_many_items")
