"""`/v1/models` as OpenAI's and as Anthropic's clients read it, and `/health`, `/ready` and `/version` for monitors."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from jinfercept.serve.protocols.anthropic.dialect import speaks_anthropic
from jinfercept.serve.protocols.errors import ApiError, shutting_down
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service, service_of
from jinfercept.version import __version__

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


health_router = APIRouter(tags=["operations"])


@health_router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Whether the engine runs or sleeps; status 503 after a failure from which the engine cannot recover."""
    llm = service_of(request).llm
    if (failure := llm.engine.failure) is not None:
        raise ApiError(503, f"the engine failed: {failure}", code="engine_error")
    return {"status": "sleeping" if llm.is_sleeping else "ok"}


@health_router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Whether the server accepts requests: 503 while it shuts down."""
    if service_of(request).draining:
        raise shutting_down()
    return {"status": "ready"}


@health_router.get("/version")
async def version() -> dict[str, str]:
    """The version of jinfercept."""
    return {"version": __version__}
