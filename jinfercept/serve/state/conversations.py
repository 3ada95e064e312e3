"""Conversations: entries to whose items clients and responses add. All functions raise 404 for an id that is not there.

The document of a conversation has its metadata, and the last response that was generated in it.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import Item, check_length
from jinfercept.serve.state.entries import Entries, check_loaded


def create(
    entries: Entries, tenant: str, created_at: int, metadata: Mapping[str, str], items: Sequence[Item]
) -> dict[str, Any]:
    conversation_id = f"conv_{uuid.uuid4().hex}"
    body = {"created_at": created_at, "metadata": metadata, "last_response_id": None}
    entries.insert(conversation_id, tenant, body, items)
    return _shown(conversation_id, body)


def read(entries: Entries, tenant: str, conversation_id: str) -> dict[str, Any]:
    return _shown(conversation_id, json.loads(_find(entries, tenant, conversation_id).document))


def change_metadata(entries: Entries, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    return _changed(entries, _find(entries, tenant, conversation_id, lock=True), metadata=metadata)


def delete(entries: Entries, tenant: str, conversation_id: str) -> None:
    """Delete a conversation and its items. Its responses remain."""
    entries.delete(_find(entries, tenant, conversation_id, lock=True).id, tenant)


def list_items(entries: Entries, tenant: str, conversation_id: str) -> Sequence[Item]:
    entry = _find(entries, tenant, conversation_id)
    check_loaded(entry.num_bytes, "conversation")
    return entries.items_of([entry.id])[entry.id].outputs


def read_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> bytes:
    return _item(entries, _find(entries, tenant, conversation_id), item_id)


def add_items(entries: Entries, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
    """Add items to the end of a conversation. Raises 400 if it would have too many."""
    entry = _find(entries, tenant, conversation_id, lock=True)
    check_length(len(items), entries.extent(entry.id)[0], "items")
    _changed(entries, entry, items)


def delete_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
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
    return list_items(entries, tenant, conversation_id), json.loads(entry.document)["last_response_id"]


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
