"""The application: its routers, what stands before all of them, and its OpenAPI document."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

from jinfercept import __version__
from jinfercept.server import chat_completions, completions, inbox, models, operations, responses, tokens
from jinfercept.server.access_log import AccessLog
from jinfercept.server.api_docs import docs_router
from jinfercept.server.errors import ERRORS, add_handlers
from jinfercept.server.live import live_router, page_router
from jinfercept.server.metrics import metrics_router
from jinfercept.server.service import Service

_DESCRIPTION = (
    "OpenAI's protocol, and vLLM's extensions of it, on jinfercept. Fields that are not known are ignored. "
    "Besides: `session_id` or the header `x-session-id`, `cache_salt`, and the object `jinfercept`."
)


def create_app(service: Service) -> FastAPI:
    """An ASGI application on a service, which is shut when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await service.warm_up()
        yield
        service.shut()

    app = FastAPI(
        title="jinfercept",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        separate_input_output_schemas=False,
        redirect_slashes=False,  # a redirect would name the host and the scheme that the client gave
        openapi_url=None,  # and so no /docs and no /redoc of FastAPI's, which load scripts from elsewhere
    )
    app.state.service = service
    add_handlers(app)
    for router in (operations.router, metrics_router(service), page_router(), docs_router()):
        app.include_router(router)
    options = service.options
    key = [Depends(HTTPBearer(auto_error=False))] if service.keys.needed else []  # for the document; see `GuardedRoute`
    guarded = [module.router for module in (chat_completions, completions, responses, models, tokens, inbox)]
    for router in (*guarded, live_router(service)):
        app.include_router(router, responses=ERRORS, dependencies=key)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["x-request-id"],
        )
    app.add_middleware(AccessLog, service=service)
    return app
