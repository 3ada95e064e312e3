"""`/health`, `/ready` and `/version`, for monitors and load balancers."""

from fastapi import APIRouter, Request

from jinfercept.serve.protocols.errors import ApiError, shutting_down
from jinfercept.serve.service import service_of
from jinfercept.version import __version__

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Whether the engine runs or sleeps; status 503 after a failure from which the engine cannot recover."""
    llm = service_of(request).llm
    if (failure := llm.engine.failure) is not None:
        raise ApiError(503, f"the engine failed: {failure}", code="engine_error")
    return {"status": "sleeping" if llm.is_sleeping else "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Whether the server accepts requests: 503 while it shuts down."""
    if service_of(request).draining:
        raise shutting_down()
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of jinfercept."""
    return {"version": __version__}
