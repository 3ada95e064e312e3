"""Rows of stored responses: inserted when a response begins, settled when it is final, found with their tenant only."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, exists, func, literal, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item
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
from jinfercept.state.tables import OPEN, ConversationItemRow, ResponseItemRow, ResponseRow, digest

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_MOST_LINKS = 5000
"""Maximum responses of a chain, more than a conversation has items."""
_AT_ONCE = 500
"""Values of one statement's `IN`."""
LOST = {"code": "server_lost", "message": "the server that generated it has ended, or had lost the database"}


class ResponseHead(NamedTuple):
    """A stored response without its documents.

    Attributes:
        status: "queued", "in_progress", or final.
        in_background: whether it is generated without a connected client.
        server_id: the server that generates or has generated it.
        is_live: whether that server has had a heartbeat lately.
        chain: ids and bytes of the response and of those that it continues, the youngest first.
    """

    status: str
    in_background: bool
    conversation_id: str | None
    server_id: str
    is_live: bool
    chain: Sequence[tuple[str, int]]

    @property
    def is_open(self) -> bool:
        """Whether it is generated."""
        return self.status in OPEN


class ResponseDocuments(NamedTuple):
    """A stored response and its own input."""

    response: dict[str, Any]
    inputs: list[Item]


def insert_response(
    session: Session,
    server: ServerClock,
    tenant: str,
    documents: ResponseDocuments,
    *,
    ttl_s: float,
    most_background: int,
) -> int:
    """Insert a response that begins; returns the bytes of its document.

    Raises:
        ApiError: 404 if the response that it continues is gone, 429 if too many of the tenant are in the background.
    """
    response, inputs = documents
    now = wall_clock(session)
    in_background = response["background"]
    if in_background:
        _check_background(session, tenant, response["id"], most_background)
    (text, text_bytes), (inputs_text, inputs_bytes) = document(response), document(inputs)
    row = {
        "id": response["id"],
        "tenant": tenant,
        "previous_id": response["previous_response_id"],
        "conversation_id": (response.get("conversation") or {}).get("id"),
        "status": response["status"],
        "in_background": in_background,
        "server_id": server.server_id,
        "is_cancelled": False,
        "is_deleted": False,
        "created_at": now,
        "expires_at": now + ttl_s,
        "num_bytes": ROW_BYTES + ITEM_BYTES * len(inputs) + text_bytes + inputs_bytes,
        "response": text,
        "asked": inputs_text,
    }
    try:
        insert_new(session, ResponseRow, [row])
    except IntegrityError:
        previous, field = response["previous_response_id"], "previous_response_id"
        code = "previous_response_not_found"
        raise ApiError(404, f"no response has the id {previous!r}", param=field, code=code) from None
    index = item_rows(tenant, 0, [item["id"] for item in inputs], response_id=response["id"])
    insert_new(session, ResponseItemRow, index)
    return text_bytes


def _check_background(session: Session, tenant: str, response_id: str, most: int) -> None:
    of_others = ResponseRow.tenant == tenant, ResponseRow.status.in_(OPEN), ResponseRow.id != response_id
    running = session.scalar(select(func.count()).where(*of_others, ResponseRow.in_background)) or 0
    if running >= most:
        raise ApiError(
            429,
            f"an API key may have {most} responses in the background; this one has {running}; fix: wait for one to end",
            param="background",
            code="too_many_background_responses",
            headers={"Retry-After": "1"},
        )


def settle_response(
    session: Session, server: ServerClock, tenant: str, documents: ResponseDocuments, begun_bytes: int
) -> int | None:
    """Write a final response; returns the bytes of its document, or None if another server has taken this one for lost.

    Without effect if it is deleted.

    Args:
        begun_bytes: what `insert_response` has returned.
    """
    response, inputs = documents
    (text, text_bytes), output = document(response), response["output"]
    is_own = ResponseRow.id == response["id"], ResponseRow.server_id == server.server_id
    settled = session.execute(
        update(ResponseRow)
        .where(*is_own, ResponseRow.status.in_(OPEN))
        .values(
            status=response["status"],
            response=text,
            num_bytes=ResponseRow.num_bytes + text_bytes - begun_bytes + ITEM_BYTES * len(output),
        )
    )
    if not settled.rowcount:  # pyright: ignore[reportAttributeAccessIssue]
        written = session.execute(select(ResponseRow.response).where(*is_own)).scalar_one_or_none()
        return text_bytes if written in (None, text) else None  # the same: an earlier attempt was committed
    index = item_rows(tenant, len(inputs), [item["id"] for item in output], response_id=response["id"])
    insert_new(session, ResponseItemRow, index)
    return text_bytes


def read_head(session: Session, server: ServerClock, response_id: str, tenant: str) -> ResponseHead | None:
    """A response of a tenant; None if there is none. One that is open and whose server is lost is shown as it is."""
    if not _RESPONSE_ID.fullmatch(response_id):
        return None
    now = clock(session)
    conditions = ResponseRow.id == response_id, ResponseRow.tenant == tenant, ~ResponseRow.is_deleted
    head = session.execute(
        select(
            ResponseRow.status,
            ResponseRow.in_background,
            ResponseRow.conversation_id,
            ResponseRow.server_id,
            is_live(ResponseRow.server_id, now, server.lost_s),
            ResponseRow.previous_id,
            ResponseRow.num_bytes,
        ).where(*conditions, (ResponseRow.expires_at > now) | ResponseRow.status.in_(OPEN))
    ).one_or_none()
    if head is None:
        return None
    status, in_background, conversation_id, server_id, live, previous_id, num_bytes = head
    earlier = [] if previous_id is None else _chain(session, previous_id)
    chain = [(response_id, num_bytes), *earlier]
    return ResponseHead(status, in_background, conversation_id, server_id, live, chain)


def _chain(session: Session, response_id: str) -> list[tuple[str, int]]:
    columns = ResponseRow.id, ResponseRow.previous_id, ResponseRow.num_bytes
    chain = select(*columns, literal(0).label("link")).where(ResponseRow.id == response_id).cte("chain", recursive=True)
    parent = aliased(ResponseRow)
    chain = chain.union_all(
        select(parent.id, parent.previous_id, parent.num_bytes, chain.c.link + 1).where(
            parent.id == chain.c.previous_id, chain.c.link < _MOST_LINKS
        )
    )
    links = session.execute(select(chain.c.id, chain.c.num_bytes).order_by(chain.c.link))
    return [(row_id, num_bytes) for row_id, num_bytes in links]


def read_responses(session: Session, response_ids: Sequence[str]) -> dict[str, ResponseDocuments]:
    """Responses by their ids; ids without a row are left out. The tenant is not checked."""
    documents: dict[str, ResponseDocuments] = {}
    for some in _parts(response_ids):
        columns = ResponseRow.id, ResponseRow.status, ResponseRow.response, ResponseRow.asked
        for row_id, status, response, inputs in session.execute(select(*columns).where(ResponseRow.id.in_(some))):
            documents[row_id] = ResponseDocuments(_with_status(json.loads(response), status), json.loads(inputs))
    return documents


def _with_status(response: dict[str, Any], status: str) -> dict[str, Any]:
    """A document with the status of its row."""
    if response["status"] in OPEN and status == "failed":
        return response | {"status": status, "error": LOST, "completed_at": response["created_at"]}
    return response | {"status": status}


def read_items(session: Session, tenant: str, item_ids: Collection[str]) -> dict[str, Item]:
    """Items of a tenant's responses and conversations by their ids, the oldest one of each id; unknown ids are left out.

    Raises:
        ApiError: 400 if they are in rows with too many bytes.
    """
    now, names = clock(session), {digest(item_id): item_id for item_id in item_ids}
    places: dict[str, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    items: dict[str, Item] = {}
    for some in _parts(sorted(names)):
        are_named = ResponseItemRow.tenant == tenant, ResponseItemRow.item.in_(some)
        live = ~ResponseRow.is_deleted, ResponseRow.expires_at > now
        columns = ResponseItemRow.item, ResponseRow.id, ResponseItemRow.place, ResponseRow.num_bytes
        stored = select(*columns).join(ResponseRow, ResponseRow.id == ResponseItemRow.response_id)
        for item, response_id, place, num_bytes in session.execute(
            stored.where(*are_named, *live).order_by(ResponseRow.created_at.desc())
        ):
            places[item] = response_id, place
            sizes[response_id] = num_bytes
    check_loaded(sum(sizes[response_id] for response_id in {at for at, _ in places.values()}), "input")
    rows = read_responses(session, sorted({response_id for response_id, _ in places.values()}))
    for item, (response_id, place) in places.items():
        response, inputs = rows[response_id]
        items[names[item]] = [*inputs, *response["output"]][place]
    return items | _conversation_items(session, tenant, {item: names[item] for item in names.keys() - places.keys()})


def _conversation_items(session: Session, tenant: str, names: Mapping[str, str]) -> dict[str, Item]:
    items: dict[str, Item] = {}
    for some in _parts(sorted(names)):
        are_named = ConversationItemRow.tenant == tenant, ConversationItemRow.item.in_(some)
        check_loaded(session.scalar(select(func.sum(ConversationItemRow.num_bytes)).where(*are_named)) or 0, "input")
        for item, body in session.execute(select(ConversationItemRow.item, ConversationItemRow.body).where(*are_named)):
            items.setdefault(names[item], json.loads(body))
    return items


def delete_response(session: Session, response_id: str, tenant: str) -> None:
    """Delete a response of a tenant; it remains, unseen, while others continue it."""
    session.execute(
        update(ResponseRow)
        .where(ResponseRow.id == response_id, ResponseRow.tenant == tenant)
        .values(is_deleted=True, is_cancelled=True)
    )
    child = aliased(ResponseRow)
    unneeded = ~exists().where(child.previous_id == response_id), ResponseRow.status.not_in(OPEN)
    session.execute(delete(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant == tenant, *unneeded))


def request_cancel(session: Session, response_id: str, tenant: str) -> None:
    """Have the server of an open response end it at its next heartbeat."""
    is_wanted = ResponseRow.id == response_id, ResponseRow.tenant == tenant
    session.execute(update(ResponseRow).where(*is_wanted, ResponseRow.status.in_(OPEN)).values(is_cancelled=True))


def fail_if_lost(session: Session, server: ServerClock, response_id: str) -> None:
    """Fail an open response whose server has had no heartbeat for a while."""
    live = is_live(ResponseRow.server_id, clock(session), server.lost_s)
    session.execute(
        update(ResponseRow)
        .where(ResponseRow.id == response_id, ResponseRow.status.in_(OPEN), ~live)
        .values(status="failed")
    )


def _parts(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[begin : begin + _AT_ONCE] for begin in range(0, len(values), _AT_ONCE)]


def remove_begun(session: Session, response_id: str, server_id: str) -> None:
    is_own = ResponseRow.id == response_id, ResponseRow.server_id == server_id, ResponseRow.status.in_(OPEN)
    session.execute(delete(ResponseRow).where(*is_own))
