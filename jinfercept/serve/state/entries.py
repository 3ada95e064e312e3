"""The two tables of the stored state, and what is done with their rows within one transaction.

An entry is a response or a conversation; an item belongs to an entry. Every query for a client names the tenant. Functions
about a conversation raise 404 for an id that is not there.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from itertools import batched
from typing import Any, NamedTuple, final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    String,
    Table,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from jinfercept.sched.tenants import UNLIMITED
from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import Item, check_length

TABLES = MetaData()
_ID = String(64)
ENTRIES = Table(
    "jinfercept_stored",
    TABLES,
    Column("id", _ID, primary_key=True),
    Column("tenant", _ID, nullable=False),
    Column("previous", _ID, ForeignKey("jinfercept_stored.id"), index=True),  # the response that it continues
    Column("changed", Double, nullable=False),
    Column("expires", Double, nullable=False, index=True),  # 0: deleted, but others continue it
    Column("num_bytes", BigInteger, nullable=False),
    Column("document", LargeBinary, nullable=False),
    Index("ix_jinfercept_stored_age", "tenant", "changed", "num_bytes"),
)
ITEMS = Table(
    "jinfercept_stored_items",
    TABLES,
    Column("owner", _ID, ForeignKey("jinfercept_stored.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True, autoincrement=False),  # negative for the input of a response
    Column("tenant", _ID, nullable=False),
    Column("name", _ID, nullable=False),  # `digest` of its id, which may have characters that a database refuses
    Column("document", LargeBinary, nullable=False),
    Index("ix_jinfercept_stored_items_name", "tenant", "name"),
)
_MOST_LOADED_BYTES = 2**26
"""Maximum bytes of documents that one request loads."""
_ENTRY_BYTES, _ITEM_BYTES = 1024, 256
"""Bytes that are counted for a row besides its document."""
_MOST_LINKS = 5000
"""Maximum responses of a chain, more than a conversation has items."""
_AT_ONCE = 500
_ENTRY_ID = re.compile(r"(resp|conv)_[0-9a-f]{32}")
_E, _I = ENTRIES.c, ITEMS.c


class StateLimits(NamedTuple):
    """Seconds until an entry expires, and the most bytes of all tenants, and of one; None: no own limit."""

    ttl_s: float = 86400.0
    most_bytes: int = UNLIMITED
    most_bytes_of_tenant: int | None = None


class OwnItems(NamedTuple):
    """The items of an entry; a conversation has only outputs."""

    inputs: list[Item]
    outputs: list[Item]


@final
class Entries:
    """The rows within one transaction. An entry expires `ttl_s` seconds after its last change."""

    def __init__(self, connection: Connection, now_s: float, ttl_s: float) -> None:
        self._rows, self._now_s, self._ttl_s = connection, now_s, ttl_s
        self._is_visible = _E.expires > now_s

    # -- read ----------------------------------------------------------------------------------------------------------

    def find(self, entry_id: str, tenant: str, *, lock: bool = False) -> Row[Any] | None:
        """The row of a tenant's entry; with `lock` no other transaction changes it before the end of this one."""
        if not _ENTRY_ID.fullmatch(entry_id):
            return None
        query = select(ENTRIES).where(_E.id == entry_id, _E.tenant == tenant, self._is_visible)
        return self._rows.execute(query.with_for_update() if lock else query).one_or_none()

    def chain(self, entry_id: str) -> Sequence[Row[Any]]:
        """The rows of an entry and of those that it continues, the youngest first. The tenant is not checked.

        Raises:
            ApiError: 400 if they have too many bytes.
        """
        columns = _E.id, _E.previous, _E.num_bytes
        links = select(*columns, literal(0).label("link")).where(_E.id == entry_id).cte("links", recursive=True)
        earlier = select(*columns, links.c.link + 1).where(_E.id == links.c.previous, links.c.link < _MOST_LINKS)
        links = links.union_all(earlier)
        check_loaded(self._rows.scalar(select(func.sum(links.c.num_bytes))) or 0, "previous_response_id")
        return self._rows.execute(select(ENTRIES).join(links, links.c.id == _E.id).order_by(links.c.link)).all()

    def items_of(self, owners: Collection[str]) -> dict[str, OwnItems]:
        items = {owner: OwnItems([], []) for owner in owners}
        for some in batched(owners, _AT_ONCE):
            query = select(_I.owner, _I.place, _I.document).where(_I.owner.in_(some)).order_by(_I.owner, _I.place)
            for owner, place, document in self._rows.execute(query):
                items[owner][place >= 0].append(json.loads(document))
        return items

    def items_named(self, tenant: str, item_ids: Collection[str]) -> dict[str, Item]:
        """Items of a tenant by their ids, the oldest one of each id; unknown ids are left out.

        Raises:
            ApiError: 400 if they have too many bytes.
        """
        items: dict[str, Item] = {}
        num_bytes = 0
        for some in batched(item_ids, _AT_ONCE):
            named = _I.tenant == tenant, _I.name.in_([digest(item_id) for item_id in some]), self._is_visible
            sources = ITEMS.join(ENTRIES, _E.id == _I.owner)
            size = select(func.sum(func.length(_I.document))).select_from(sources).where(*named)
            num_bytes += self._rows.scalar(size) or 0
            check_loaded(num_bytes, "input")
            query = select(_I.document).select_from(sources).where(*named).order_by(_E.changed.desc(), _I.place.desc())
            read = [json.loads(document) for document in self._rows.scalars(query)]
            items |= {item["id"]: item for item in read}
        return items

    def item(self, owner: str, item_id: str) -> bytes | None:
        """The document of an item of an entry."""
        query = select(_I.document).where(_I.owner == owner, _I.name == digest(item_id)).order_by(_I.place)
        return self._rows.scalars(query.limit(1)).one_or_none()

    def extent(self, owner: str) -> tuple[int, int]:
        """The number of an entry's items, and the place behind the last one."""
        query = select(func.count(), func.coalesce(func.max(_I.place) + 1, 0)).where(_I.owner == owner)
        number, end = self._rows.execute(query).one()
        return number, end

    # -- written -------------------------------------------------------------------------------------------------------

    def insert(
        self,
        entry_id: str,
        tenant: str,
        body: Mapping[str, Any],
        items: Sequence[Item] = (),
        *,
        first: int = 0,
        previous: str | None = None,
    ) -> None:
        """Insert an entry with items, the first one at the place `first`.

        Raises:
            IntegrityError: the response that it continues is gone.
        """
        document, (rows, num_bytes) = encode(body), self._item_rows(entry_id, tenant, items, first)
        num_bytes += _ENTRY_BYTES + len(document)
        row = {"id": entry_id, "tenant": tenant, "previous": previous, "num_bytes": num_bytes}
        self._rows.execute(insert(ENTRIES), row | self._times() | {"document": document})
        self._add(rows)

    def update(self, entry: Row[Any], body: Mapping[str, Any], items: Sequence[Item] = (), *, first: int = 0) -> None:
        """Replace the document of an entry, and add items, the first one at the place `first`."""
        document, (rows, num_bytes) = encode(body), self._item_rows(entry.id, entry.tenant, items, first)
        num_bytes += len(document) - len(entry.document)
        changed = {"document": document, "num_bytes": _E.num_bytes + num_bytes, **self._times()}
        self._rows.execute(update(ENTRIES).where(_E.id == entry.id).values(changed))
        self._add(rows)

    def delete(self, entry_id: str, tenant: str) -> None:
        """Delete an entry of a tenant; it remains, unseen, while others continue it."""
        mine = _E.id == entry_id, _E.tenant == tenant
        self._rows.execute(update(ENTRIES).where(*mine).values(expires=0.0))
        self._rows.execute(delete(ENTRIES).where(*mine, ~_is_continued()))

    def delete_items(self, entry: Row[Any], item_id: str) -> None:
        mine = _I.owner == entry.id, _I.name == digest(item_id)
        size = select(func.coalesce(func.sum(func.length(_I.document) + _ITEM_BYTES), 0)).where(*mine)
        freed = int(self._rows.scalar(size) or 0)
        self._rows.execute(delete(ITEMS).where(*mine))
        self._rows.execute(update(ENTRIES).where(_E.id == entry.id).values(num_bytes=_E.num_bytes - freed))

    # -- kept and removed ----------------------------------------------------------------------------------------------

    def sweep(self, limits: StateLimits) -> bool:
        """Remove what is deleted, has expired, or is beyond the limits; whether there may be more to remove."""
        has_more = self._shrink(limits)
        return self._remove() or has_more

    def _shrink(self, limits: StateLimits) -> bool:
        """Delete the oldest entries of tenants that hold too much, a bounded number at a time; whether that was not all."""
        has_more = False
        query = select(_E.tenant, func.sum(_E.num_bytes)).group_by(_E.tenant)  # what others continue has bytes, too
        sizes = {tenant: int(size) for tenant, size in self._rows.execute(query)}
        for tenant, over in excess(sizes, limits.most_bytes, limits.most_bytes_of_tenant).items():
            mine = select(_E.id, _E.num_bytes).where(_E.tenant == tenant, _E.expires > 0)
            oldest = list[str]()
            for entry_id, num_bytes in self._rows.execute(mine.order_by(_E.changed, _E.id).limit(_AT_ONCE)):
                if over > 0:
                    oldest.append(entry_id)
                    over -= num_bytes
            self._rows.execute(update(ENTRIES).where(_E.id.in_(oldest)).values(expires=0.0))
            has_more |= len(oldest) == _AT_ONCE
        return has_more

    def _remove(self) -> bool:
        unneeded = select(_E.id, _E.previous).where(~self._is_visible, ~_is_continued())
        rows = first = self._rows.execute(unneeded.limit(_AT_ONCE)).all()
        while rows:  # then those that they continued
            self._rows.execute(delete(ENTRIES).where(_E.id.in_([row.id for row in rows])))
            earlier = {row.previous for row in rows if row.previous is not None}
            rows = self._rows.execute(unneeded.where(_E.id.in_(earlier))).all()
        return bool(first)

    def _times(self) -> dict[str, float]:
        return {"changed": self._now_s, "expires": self._now_s + self._ttl_s}

    def _item_rows(
        self, owner: str, tenant: str, items: Sequence[Item], first: int
    ) -> tuple[list[dict[str, Any]], int]:
        shared = {"owner": owner, "tenant": tenant}
        rows = [
            {"place": place, "name": digest(item["id"]), "document": encode(item), **shared}
            for place, item in enumerate(items, start=first)
        ]
        return rows, sum(_ITEM_BYTES + len(row["document"]) for row in rows)

    def _add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for some in batched(rows, _AT_ONCE):
            self._rows.execute(insert(ITEMS), some)


def excess(sizes: Mapping[str, int], most: int, most_of_tenant: int | None) -> dict[str, int]:
    """What each tenant gives back so that all fits: those that hold the most give back, down to an equal level.

    Args:
        sizes: bytes by tenant.
        most, most_of_tenant: limits of all tenants together, and of one.
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
    return {tenant: number for tenant, number in over.items() if number > 0}


def check_loaded(num_bytes: int, param: str) -> None:
    """Raise 400 if a request would load too many bytes of what the field `param` names."""
    if num_bytes > _MOST_LOADED_BYTES:
        message = f"the stored conversation has {num_bytes} bytes; at most {_MOST_LOADED_BYTES} can be loaded"
        raise ApiError.bad(message, param, "context_length_exceeded")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_continued() -> ColumnElement[bool]:
    later = ENTRIES.alias()
    return exists().where(later.c.previous == _E.id)


def create_conversation(
    entries: Entries, tenant: str, created_at: int, metadata: Mapping[str, str], items: Sequence[Item]
) -> dict[str, Any]:
    conversation_id = f"conv_{uuid.uuid4().hex}"
    body = {"created_at": created_at, "metadata": metadata, "last_response_id": None}
    entries.insert(conversation_id, tenant, body, items)
    return _shown(conversation_id, body)


def read_conversation(entries: Entries, tenant: str, conversation_id: str) -> dict[str, Any]:
    return _shown(conversation_id, json.loads(_find(entries, tenant, conversation_id).document))


def change_metadata(entries: Entries, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    return _changed(entries, _find(entries, tenant, conversation_id, lock=True), metadata=metadata)


def delete_conversation(entries: Entries, tenant: str, conversation_id: str) -> None:
    """Delete a conversation and its items. Its responses remain."""
    entries.delete(_find(entries, tenant, conversation_id, lock=True).id, tenant)


def conversation_items(entries: Entries, tenant: str, conversation_id: str) -> Sequence[Item]:
    entry = _find(entries, tenant, conversation_id)
    check_loaded(entry.num_bytes, "conversation")
    return entries.items_of([entry.id])[entry.id].outputs


def conversation_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> bytes:
    return _item(entries, _find(entries, tenant, conversation_id), item_id)


def add_items(entries: Entries, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
    """Add items to the end of a conversation. Raises 400 if it would have too many."""
    entry = _find(entries, tenant, conversation_id, lock=True)
    check_length(len(items), entries.extent(entry.id)[0], "items")
    _changed(entries, entry, items)


def delete_conversation_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Delete an item; returns the object of the conversation."""
    entry = _find(entries, tenant, conversation_id, lock=True)
    _item(entries, entry, item_id)
    entries.delete_items(entry, item_id)
    return _changed(entries, entry, last_response_id=None)


def begin_turn(entries: Entries, tenant: str, conversation_id: str, number: int) -> tuple[Sequence[Item], str | None]:
    """The items before a response of a conversation, and the last response; `number` counts the response's own input items.

    Raises:
        ApiError: 404; 400 if the conversation is too long.
    """
    entry = _find(entries, tenant, conversation_id)
    check_length(number, entries.extent(entry.id)[0])
    return conversation_items(entries, tenant, conversation_id), json.loads(entry.document)["last_response_id"]


def end_turn(entries: Entries, tenant: str, conversation_id: str, response_id: str, items: Sequence[Item]) -> None:
    """Add input and output of a response to its conversation, unless that is deleted, or has them already."""
    entry = entries.find(conversation_id, tenant, lock=True)
    if entry is not None and json.loads(entry.document)["last_response_id"] != response_id:
        _changed(entries, entry, items, last_response_id=response_id)


def _find(entries: Entries, tenant: str, conversation_id: str, *, lock: bool = False) -> Row[Any]:
    entry = entries.find(conversation_id, tenant, lock=lock) if conversation_id.startswith("conv_") else None
    if entry is None:
        message = f"no conversation has the id {conversation_id[:200]!r}"
        raise ApiError(404, message, param="conversation", code="conversation_not_found")
    return entry


def _changed(entries: Entries, entry: Row[Any], items: Sequence[Item] = (), **changes: Any) -> dict[str, Any]:
    body = json.loads(entry.document) | changes
    entries.update(entry, body, items, first=entries.extent(entry.id)[1])
    return _shown(entry.id, body)


def _item(entries: Entries, entry: Row[Any], item_id: str) -> bytes:
    document = entries.item(entry.id, item_id)
    if document is None:
        raise ApiError(404, f"no item of this conversation has the id {item_id[:200]!r}", code="item_not_found")
    return document


def _shown(conversation_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: body[name] for name in ("created_at", "metadata")}
    return {"id": conversation_id, "object": "conversation", **fields}
