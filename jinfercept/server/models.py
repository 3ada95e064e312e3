"""`/v1/models`: the names of the served model."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from jinfercept.server.guarded_route import GuardedRoute
from jinfercept.server.service import Service, service_of

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])


class ModelCard(BaseModel):
    """One name of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jinfercept"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The names of the model that is served."""
    service = service_of(request)
    return ModelList(data=[_card(service, name) for name in service.names])


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> ModelCard:
    """One name of the model that is served."""
    service = service_of(request)
    return _card(service, service.check_model(model))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, root=service.root, max_model_len=service.max_model_len)
