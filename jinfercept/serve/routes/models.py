"""`/v1/models`: the names of the served model and of its adapters, as OpenAI's and as Anthropic's clients read them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from jinfercept.serve.protocols.anthropic.dialect import speaks_anthropic
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service, service_of

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The names of the model that is served; with the header `anthropic-version` in Anthropic's form, on one page."""
    service = service_of(request)
    names = (*service.names, *service.llm.loras)
    if not speaks_anthropic(request.scope):
        return {"object": "list", "data": [_card(service, name) for name in names]}
    data = [_info(service, name) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> dict[str, Any]:
    """One name of the model that is served; with the header `anthropic-version` in Anthropic's form."""
    service = service_of(request)
    name = service.check_model(model)
    return _info(service, name) if speaks_anthropic(request.scope) else _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    """A name of the model, or an adapter: its `root` is the name of its directory, and its `parent` the model's name."""
    adapter, length = service.adapter(name), service.max_model_len  # clients learn no path of the server's
    root, parent = (service.root, None) if adapter is None else (Path(adapter.source).name, service.names[0])
    card = {"id": name, "object": "model", "created": service.created, "owned_by": "jinfercept"}
    return card | {"root": root, "parent": parent, "max_model_len": length, "context_length": length}


def _info(service: Service, name: str) -> dict[str, Any]:
    created, most = datetime.fromtimestamp(service.created, UTC).isoformat(), service.max_model_len
    info = {"id": name, "type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
    return info | {"max_input_tokens": most, "max_tokens": most}
