"""`/v1/conversations`: conversations whose items are stored here, and to which `/v1/responses` adds its input and output."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from jinfercept.serve.protocols.encoding import EncodedReply, encode
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_chat import check_metadata
from jinfercept.serve.protocols.openai.response_items import Item, read_items, references
from jinfercept.serve.protocols.openai.response_schemas import InputItem, OtherItem
from jinfercept.serve.protocols.schemas import FIRST_ERROR, Body
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import service_of, tenant_of
from jinfercept.serve.state import entries as stored

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])

_MOST_ADDED = 20
"""Maximum items of a body, as OpenAI's."""
_PAGE_BYTES = 2**24
"""Bytes of items after which a page ends, whatever its limit."""
_Items = Annotated[list[InputItem], Field(max_length=_MOST_ADDED), FIRST_ERROR]


class NewConversationBody(Body):
    """The first items and the metadata of a conversation."""

    items: _Items | None = None
    metadata: dict[str, Any] | None = None


class MetadataBody(Body):
    """The metadata of a conversation; they replace the old ones."""

    metadata: dict[str, Any]


class NewItemsBody(Body):
    """Items for the end of a conversation."""

    items: _Items


class PageQuery(BaseModel):
    """Which items of a list are shown: so many behind the one with the id `after`."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@router.post("/v1/conversations")
async def create_conversation(request: Request, body: NewConversationBody | None = None) -> Response:
    """Create a conversation."""
    metadata = body.metadata or {} if body else {}
    check_metadata(metadata)
    items = await _read(request, body.items or [] if body else [])
    return EncodedReply(await _run(request, stored.create_conversation, int(time.time()), metadata, items))


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, request: Request) -> Response:
    """A conversation without its items."""
    return EncodedReply(await _run(request, stored.read_conversation, conversation_id, writes=False))


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(conversation_id: str, body: MetadataBody, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    check_metadata(body.metadata)
    return EncodedReply(await _run(request, stored.change_metadata, conversation_id, body.metadata))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation and its items. Its responses remain."""
    await _run(request, stored.delete_conversation, conversation_id)
    return EncodedReply({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/v1/conversations/{conversation_id}/items")
async def create_items(conversation_id: str, body: NewItemsBody, request: Request) -> Response:
    """Add items to the end of a conversation."""
    items = await _read(request, body.items)
    service_of(request).state.check_unlocked(conversation_id, tenant_of(request))
    await _run(request, stored.add_items, conversation_id, items)
    return await service_of(request).prepare(request, lambda: item_page(items, PageQuery(limit=100, order="asc")))


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, request: Request, page: Annotated[PageQuery, Query()]) -> Response:
    """A page of the items of a conversation. A page has fewer items than `limit` if they are long."""
    items = await _run(request, stored.conversation_items, conversation_id, writes=False)
    return await service_of(request).prepare(request, lambda: item_page(items, page))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """An item of a conversation."""
    document = await _run(request, stored.conversation_item, conversation_id, item_id, writes=False)
    return Response(document, media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Delete an item of a conversation; returns the conversation."""
    service_of(request).state.check_unlocked(conversation_id, tenant_of(request))
    return EncodedReply(await _run(request, stored.delete_conversation_item, conversation_id, item_id))


async def _read(request: Request, inputs: Sequence[InputItem]) -> list[Item]:
    """The items of a body as they are stored. Raises 400 and 404."""
    service = service_of(request)
    for index, item in enumerate(inputs):
        if isinstance(item, OtherItem):
            raise ApiError.bad(f"a conversation cannot store items of type {item.type[:80]!r}", f"items[{index}]")
    try:
        referred = await service.state.items(references(inputs), tenant_of(request))
        return await service.prepare(request, lambda: read_items(inputs, (), referred, check_calls=False))
    except ApiError as error:
        error.param = error.param.replace("input", "items", 1) if error.param else None
        raise


async def _run[T](request: Request, work: Callable[..., T], *arguments: Any, writes: bool = True) -> T:
    tenant = tenant_of(request)
    return await service_of(request).state.run(tenant, lambda entries: work(entries, tenant, *arguments), writes=writes)


def item_page(items: Sequence[Item], page: PageQuery) -> Response:
    """A page of items, as an HTTP response. Raises 400 if no item has the id of `after`."""
    items = items[::-1] if page.order == "desc" else items
    if page.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise ApiError.bad(f"no item of this list has the id {page.after[:200]!r}", "after")
        items = items[places[-1] + 1 :]
    shown: list[bytes] = []
    num_bytes = 0
    for item in items[: page.limit]:
        if num_bytes < _PAGE_BYTES:
            shown.append(encode(item))
            num_bytes += len(shown[-1])
    number = len(shown)
    first, last = (items[0]["id"], items[number - 1]["id"]) if number else (None, None)
    head = encode({"object": "list", "first_id": first, "last_id": last, "has_more": len(items) > number})
    return Response(head[:-1] + b',"data":[' + b",".join(shown) + b"]}", media_type="application/json")
