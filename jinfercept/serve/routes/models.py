"""`/v1/models`: the names of the served model and of its adapters, as OpenAI's and as Anthropic's clients read them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
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
    """All names of the model, in Anthropic's protocol."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList | ModelPage:
    """The names of the model that is served; with the header `anthropic-version` in Anthropic's form."""
    service = service_of(request)
    if speaks_anthropic(request.scope):
        listed = [_info(service, name) for name in _names(service)]
        return ModelPage(data=listed, first_id=listed[0].id, last_id=listed[-1].id)
    return ModelList(data=[_card(service, name) for name in _names(service)])


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> ModelCard | ModelInfo:
    """One name of the model that is served; with the header `anthropic-version` in Anthropic's form."""
    service = service_of(request)
    name = service.check_model(model)
    return _info(service, name) if speaks_anthropic(request.scope) else _card(service, name)


def _names(service: Service) -> tuple[str, ...]:
    return (*service.names, *service.llm.loras)


def _card(service: Service, name: str) -> ModelCard:
    adapter = service.adapter(name)  # clients learn no path of the server's
    root, parent = (service.root, None) if adapter is None else (Path(adapter.source).name, service.names[0])
    return ModelCard(id=name, created=service.created, root=root, parent=parent, max_model_len=service.max_model_len)


def _info(service: Service, name: str) -> ModelInfo:
    created, most = datetime.fromtimestamp(service.created, UTC), service.max_model_len
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=most, max_tokens=most)
