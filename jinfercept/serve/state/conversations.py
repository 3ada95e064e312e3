"""Conversations: entries to whose items clients and responses add. One response at a time is generated in a conversation.

The document of a conversation has its metadata, the response that is generated in it (`turn`), and the last one that was.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import Item
from jinfercept.serve.protocols.openai.response_schemas import MAX_ITEMS
from jinfercept.serve.state.entries import Entries, StateEntry, check_loaded


def create(
    entries: Entries, tenant: str, created_at: int, metadata: Mapping[str, str], items: Sequence[Item]
) -> dict[str, Any]:
    """Insert a conversation; returns its object."""
    conversation_id = f"conv_{uuid.uuid4().hex}"
    body = {"created_at": created_at, "metadata": metadata, "turn": None, "last_response_id": None}
    entries.insert(conversation_id, tenant, body, items)
    return _shown(conversation_id, body)


def read(entries: Entries, tenant: str, conversation_id: str) -> dict[str, Any]:
    """The object of a conversation. Raises 404."""
    return _shown(conversation_id, _find(entries, tenant, conversation_id).body)


def change_metadata(entries: Entries, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The object of a conversation with new metadata. Raises 404."""
    entry = _find(entries, tenant, conversation_id, lock=True)
    body = entry.body | {"metadata": metadata}
    entries.update(entry, body, is_open=entry.is_open)
    return _shown(conversation_id, body)


def delete(entries: Entries, tenant: str, conversation_id: str) -> None:
    """Delete a conversation and its items. Its responses remain. Raises 404."""
    entries.delete(_find(entries, tenant, conversation_id, lock=True).id, tenant)


def list_items(entries: Entries, tenant: str, conversation_id: str) -> Sequence[Item]:
    """The items of a conversation. Raises 404."""
    entry = _find(entries, tenant, conversation_id)
    check_loaded(entry.num_bytes, "conversation")
    return entries.items_of([entry.id])[entry.id].outputs


def read_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> bytes:
    """The document of an item of a conversation. Raises 404."""
    return _item(entries, _find(entries, tenant, conversation_id), item_id)


def add_items(entries: Entries, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
    """Add items to the end of a conversation.

    Raises:
        ApiError: 404; 409 while a response is generated in it; 400 if it would have too many items.
    """
    entry = _unlocked(entries, tenant, conversation_id)
    end = _checked_end(entries, entry, len(items), "items")
    entries.update(entry, entry.body | {"turn": None}, items, first=end, is_open=False)


def delete_item(entries: Entries, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Delete an item; returns the object of the conversation.

    Raises:
        ApiError: 404; 409 while a response is generated in it.
    """
    entry = _unlocked(entries, tenant, conversation_id)
    _item(entries, entry, item_id)
    body = entry.body | {"turn": None, "last_response_id": None}
    entries.update(entries.delete_items(entry, item_id), body, is_open=False)
    return _shown(conversation_id, body)


def begin_turn(
    entries: Entries, tenant: str, conversation_id: str, response_id: str, number: int
) -> tuple[Sequence[Item], str | None]:
    """Begin a response in a conversation; no other one begins before it ends.

    Args:
        number: of the response's own input items.

    Returns:
        The items before it, and the last response.

    Raises:
        ApiError: 404; 409 if another response is generated in it; 400 if it is too long.
    """
    entry = _unlocked(entries, tenant, conversation_id)
    _checked_end(entries, entry, number, "input")
    check_loaded(entry.num_bytes, "conversation")
    body = entry.body | {"turn": response_id}
    entries.update(entry, body, is_open=True)
    return entries.items_of([entry.id])[entry.id].outputs, body["last_response_id"]


def end_turn(entries: Entries, tenant: str, conversation_id: str, response_id: str, items: Sequence[Item]) -> bool:
    """Add the items of a response to its conversation, and end its turn; False if another response has begun meanwhile.

    Without effect if the conversation is deleted.

    Args:
        items: input and output of the response; none if it has failed.
    """
    entry = entries.find(conversation_id, tenant, lock=True)
    if entry is None:
        return True
    body = entry.body
    if body["turn"] != response_id:
        return body["last_response_id"] == response_id  # an earlier attempt was committed
    body |= {"turn": None} | ({"last_response_id": response_id} if items else {})
    entries.update(entry, body, items, first=entries.extent(entry.id)[1], is_open=False)
    return True


def _find(entries: Entries, tenant: str, conversation_id: str, *, lock: bool = False) -> StateEntry:
    entry = entries.find(conversation_id, tenant, lock=lock) if conversation_id.startswith("conv_") else None
    if entry is None:
        message = f"no conversation has the id {conversation_id[:200]!r}"
        raise ApiError(404, message, param="conversation", code="conversation_not_found")
    return entry


def _unlocked(entries: Entries, tenant: str, conversation_id: str) -> StateEntry:
    """A conversation in which nothing is generated, until the end of the transaction. OpenAI's clients retry after the 409."""
    entry = _find(entries, tenant, conversation_id, lock=True)
    if entry.is_open:
        message = "another response is being generated in this conversation; fix: retry when it has ended"
        retry = {"Retry-After": "1"}
        raise ApiError(409, message, param="conversation", code="conversation_locked", headers=retry)
    return entry


def _checked_end(entries: Entries, entry: StateEntry, number: int, param: str) -> int:
    """The place behind a conversation's last item. Raises 400 if it would have too many with `number` more."""
    num_before, end = entries.extent(entry.id)
    if num_before + number > MAX_ITEMS:
        message = (
            f"a conversation has at most {MAX_ITEMS} items; this one has {num_before}, and {number} would be added"
        )
        raise ApiError.bad(message, param, "too_many_items")
    return end


def _item(entries: Entries, entry: StateEntry, item_id: str) -> bytes:
    document = entries.item(entry.id, item_id)
    if document is None:
        raise ApiError(404, f"no item of this conversation has the id {item_id[:200]!r}", code="item_not_found")
    return document


def _shown(conversation_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": body["created_at"],
        "metadata": body["metadata"],
    }
