"""`/v1/models`: the names of the served model and of its adapters, as OpenAI's and as Anthropic's clients read them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from jinfercept.serve.protocols.anthropic.dialect import speaks_anthropic
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service, service_of

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])


class ModelCard(BaseModel):
    """One name of the model, or an adapter: its `root` is the name of its directory, and its `parent` the model's name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jinfercept"
    root: str
    parent: str | None = None
    max_model_len: int
    context_length: int


class ModelList(BaseModel):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelInfo(BaseModel):
    """One name of the model, in Anthropic's protocol."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(BaseModel):
    """A page of the names of the model, in Anthropic's protocol."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/v1/models")
async def list_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> ModelList | ModelPage:
    """The names of the model that is served; with the header `anthropic-version` a page of them, in Anthropic's form."""
    service = service_of(request)
    names = (*service.names, *service.llm.loras)
    if not speaks_anthropic(request.scope):
        return ModelList(data=[_card(service, name) for name in names])
    start = 0 if after_id is None else names.index(service.check_model(after_id)) + 1
    end = None if before_id is None else names.index(service.check_model(before_id))
    names = names[start:end]
    data = [_info(service, name) for name in (names[:limit] if end is None else names[-limit:])]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return ModelPage(data=data, has_more=len(data) < len(names), first_id=first_id, last_id=last_id)


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> ModelCard | ModelInfo:
    """One name of the model that is served; with the header `anthropic-version` in Anthropic's form."""
    service = service_of(request)
    name = service.check_model(model)
    return _info(service, name) if speaks_anthropic(request.scope) else _card(service, name)


def _card(service: Service, name: str) -> ModelCard:
    adapter, length = service.adapter(name), service.max_model_len  # clients learn no path of the server's
    root, parent = (service.root, None) if adapter is None else (Path(adapter.source).name, service.names[0])
    created = service.created
    return ModelCard(id=name, created=created, root=root, parent=parent, max_model_len=length, context_length=length)


def _info(service: Service, name: str) -> ModelInfo:
    created, most = datetime.fromtimestamp(service.created, UTC), service.max_model_len
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=most, max_tokens=most)
