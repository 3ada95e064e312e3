"""`/health`, `/ready` and `/version`, for monitors and load balancers."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from jinfercept.serve.protocols.errors import ApiError, shutting_down
from jinfercept.serve.service import service_of
from jinfercept.version import __version__

router = APIRouter(tags=["operations"])


class Condition(BaseModel):
    """Status of the server."""

    status: str


class Version(BaseModel):
    """Version of the server."""

    version: str


@router.get("/health")
async def health(request: Request) -> Condition:
    """Whether the engine runs or sleeps; status 503 after a failure from which the engine cannot recover."""
    llm = service_of(request).llm
    if (failure := llm.engine.failure) is not None:
        raise ApiError(503, f"the engine failed: {failure}", code="engine_error")
    return Condition(status="sleeping" if llm.is_sleeping else "ok")


@router.get("/ready")
async def ready(request: Request) -> Condition:
    """Whether the server accepts requests: 503 while it shuts down."""
    if service_of(request).draining:
        raise shutting_down()
    return Condition(status="ready")


@router.get("/version")
async def version() -> Version:
    """The version of jinfercept."""
    return Version(version=__version__)
