"""The FastAPI application: its routers, its middleware, and its OpenAPI document."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer

from jinfercept.serve.http.middleware import add_handlers, add_middleware
from jinfercept.serve.observe.live import live_router, page_router
from jinfercept.serve.observe.metrics import metrics_router
from jinfercept.serve.routes import (
    chat_completions,
    completions,
    conversations,
    inbox,
    messages,
    models,
    operators,
    response_socket,
    responses,
    tokens,
)
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service
from jinfercept.version import __version__

_DESCRIPTION = (
    "OpenAI's protocol with vLLM's extensions, and Anthropic's Messages, on jinfercept. Unknown fields are ignored. "
    "Further extensions: `session_id` or the header `x-session-id`, `cache_salt`, and the object `jinfercept`."
)

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"description": "An error object of the protocol."}}


def create_app(service: Service) -> FastAPI:
    """The ASGI application of a service. Its lifespan warms the service up and closes it.

    Raises:
        ImportError: the service is offered over MCP, whose package is missing.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await service.warm_up()
        watching = asyncio.create_task(service.watch_key_file())
        yield
        watching.cancel()
        service.close_threads()
        await service.close_state()

    app = FastAPI(
        title="jinfercept",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would repeat the host and the scheme that the client sent
        openapi_url=None,  # FastAPI's own needs no key, and its pages load scripts from other hosts
    )
    app.state.service, app.state.refused = service, service.refused
    add_handlers(app)
    for router in (models.health_router, metrics_router(service), page_router(), response_socket.router):
        app.include_router(router)
    options = service.options
    key = [Depends(HTTPBearer(auto_error=False))] if service.keys.needed else []  # for the document; see `GuardedRoute`
    modules = chat_completions, completions, responses, conversations, messages, models, tokens, inbox
    guarded = [module.router for module in modules]
    guarded += [operators.weights_router] if options.weights_dir is not None else []
    guarded += [operators.lora_router] if options.lora_dir is not None else []
    if options.mcp:
        from jinfercept.serve.routes.mcp import mcp_router

        guarded.append(mcp_router(options.max_body_size))
    for router in (*guarded, live_router(service), _document_router()):
        app.include_router(router, responses=_ERRORS, dependencies=key)
    add_middleware(app, service)
    return app


def _document_router() -> APIRouter:
    router = APIRouter(route_class=GuardedRoute)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> dict[str, Any]:
        return request.app.openapi()

    return router
