"""`/v1/conversations`: conversations whose items are stored here, and to which `/v1/responses` adds its input and output."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from jinfercept.protocols.encoding import EncodedReply, encode
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_chat import check_metadata
from jinfercept.protocols.openai.response_items import Item, read_items, references
from jinfercept.protocols.openai.response_schemas import InputItem, ItemList, OtherItem
from jinfercept.protocols.schemas import FIRST_ERROR, Body
from jinfercept.server.routes.guarded_route import GuardedRoute
from jinfercept.server.service import service_of, tenant_of
from jinfercept.state import conversation_rows as rows
from jinfercept.state.conversation_rows import ItemPage, StoredConversation

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])

_MOST_ADDED = 20
"""Maximum items of a body, as OpenAI's."""
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


class ConversationObject(BaseModel):
    """A conversation; `created_at` in seconds since 1970."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    """Confirms that a conversation is deleted."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


@router.post("/v1/conversations", response_model=ConversationObject)
async def create_conversation(request: Request, body: NewConversationBody | None = None) -> Response:
    """Create a conversation."""
    inputs = body.items or [] if body else []
    metadata = body.metadata or {} if body else {}
    check_metadata(metadata)
    items = await _read(request, inputs)
    conversation = StoredConversation(f"conv_{uuid.uuid4().hex}", int(time.time()), metadata)
    num_bytes = await _run(request, rows.create_conversation, conversation, items, _ttl_s(request))
    service_of(request).database.written_bytes += num_bytes
    return _shown(conversation)


@router.get("/v1/conversations/{conversation_id}", response_model=ConversationObject)
async def get_conversation(conversation_id: str, request: Request) -> Response:
    """A conversation without its items."""
    return _shown(await _run(request, rows.read_conversation, conversation_id))


@router.post("/v1/conversations/{conversation_id}", response_model=ConversationObject)
async def update_conversation(conversation_id: str, body: MetadataBody, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    check_metadata(body.metadata)
    return _shown(await _run(request, rows.change_metadata, conversation_id, body.metadata, _ttl_s(request)))


@router.delete("/v1/conversations/{conversation_id}", response_model=DeletedConversation)
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation and its items. Its responses remain."""
    await _run(request, rows.read_conversation, conversation_id)
    await _run(request, rows.delete_conversation, conversation_id, frees=True)
    return EncodedReply({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/v1/conversations/{conversation_id}/items", response_model=ItemList)
async def create_items(conversation_id: str, body: NewItemsBody, request: Request) -> Response:
    """Add items to the end of a conversation."""
    items = await _read(request, body.items)
    num_bytes = await _run(request, rows.add_items, conversation_id, items, uuid.uuid4().hex, _ttl_s(request))
    service_of(request).database.written_bytes += num_bytes
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)

    def page() -> Response:
        return _listed(ItemPage([encode(item).decode() for item in items], first_id, last_id, has_more=False))

    return await service_of(request).prepare(request, page)


@router.get("/v1/conversations/{conversation_id}/items", response_model=ItemList)
async def list_items(
    conversation_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """A page of the items of a conversation. A page has fewer items than `limit` if they are long."""

    def page(session: Session, tenant: str) -> Response:
        return _listed(rows.list_items(session, tenant, conversation_id, limit, order == "desc", after))

    return await _run(request, page)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", response_model=dict[str, Any])
async def get_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """An item of a conversation."""
    return Response(await _run(request, rows.read_item, conversation_id, item_id), media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", response_model=ConversationObject)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Delete an item of a conversation; returns the conversation."""
    await _run(request, rows.read_item, conversation_id, item_id)
    return _shown(await _run(request, rows.delete_item, conversation_id, item_id, _ttl_s(request), frees=True))


async def _read(request: Request, inputs: Sequence[InputItem]) -> list[Item]:
    """The items of a body as they are stored. Raises 400 and 404."""
    service = service_of(request)
    for index, item in enumerate(inputs):
        if isinstance(item, OtherItem):
            raise ApiError.bad(f"a conversation cannot store items of type {item.type[:80]!r}", f"items[{index}]")
    try:
        referred = await service.responses.items(references(inputs), tenant_of(request)) if references(inputs) else {}
        return await service.prepare(request, lambda: read_items(inputs, (), referred, check_calls=False))
    except ApiError as error:
        error.param = error.param.replace("input", "items", 1) if error.param else None
        raise


async def _run[T](request: Request, work: Callable[..., T], *arguments: Any, frees: bool = False) -> T:
    """The result of work on rows of the tenant of a request, in one transaction."""
    tenant = tenant_of(request)
    return await service_of(request).database.run(
        tenant, lambda session: work(session, tenant, *arguments), frees=frees
    )


def _ttl_s(request: Request) -> float:
    return service_of(request).options.response_ttl


def _shown(conversation: StoredConversation) -> Response:
    return EncodedReply(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_at),
            "metadata": conversation.metadata,
        }
    )


def _listed(page: ItemPage) -> Response:
    about = {"object": "list", "first_id": page.first_id, "last_id": page.last_id, "has_more": page.has_more}
    body = encode(about)[:-1].decode() + ',"data":[' + ",".join(page.bodies) + "]}"
    return Response(body, media_type="application/json")
