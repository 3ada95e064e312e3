"""Pauses, sleep and new weights, where `--weights-dir` allows them, with vLLM's names where it has them. For operators."""

import logging
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from jinfercept.server.routes.adapters import confined
from jinfercept.server.routes.guarded_route import GuardedRoute
from jinfercept.server.service import Service, service_of, tenant_of

log = logging.getLogger("jinfercept.server")

router = APIRouter(route_class=GuardedRoute, tags=["Weights"])


class WeightsUpdate(BaseModel):
    """A checkpoint of the same model. `path` is a directory in that of `--weights-dir`, relative to it or absolute."""

    path: str = Field(min_length=1, max_length=1000)
    mode: Literal["keep", "recompute", "abort"] = "recompute"
    """What becomes of unfinished requests, see `LLM.update_weights`."""


@router.post("/pause")
async def pause(request: Request) -> dict[str, bool]:
    """Run nothing until `/resume`: requests wait, calls of tools go on."""
    return await _sleep(request, 0)


@router.post("/resume")
async def resume(request: Request) -> dict[str, bool]:
    """Go on after `/pause` or `/sleep`."""
    service = _allowed(request)
    await service.prepare(request, service.llm.wake)
    log.info("the engine goes on")
    return {"is_sleeping": service.llm.is_sleeping}


@router.post("/wake_up")
async def wake_up(request: Request) -> dict[str, bool]:
    """As `/resume`."""
    return await resume(request)


@router.post("/sleep")
async def sleep(request: Request, level: int = Query(1, ge=0, le=2)) -> dict[str, bool]:
    """Give memory of the device back: at level 1 the pages, at level 2 the weights too, which the host keeps."""
    return await _sleep(request, level)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether the engine waits for `/resume`."""
    return {"is_sleeping": _allowed(request).llm.is_sleeping}


@router.post("/update_weights")
async def update_weights(body: WeightsUpdate, request: Request) -> dict[str, int]:
    """Serve the weights of a checkpoint from now on, without a wait for requests."""
    service = _allowed(request)
    directory = confined(Path(service.options.weights_dir or ""), body.path, "path", "--weights-dir")
    version = await service.prepare(request, lambda: service.llm.update_weights(directory, mode=body.mode))
    log.info("weights of version %d were read from %s", version, directory)
    return {"weights_version": version}


async def _sleep(request: Request, level: int) -> dict[str, bool]:
    service = _allowed(request)
    await service.prepare(request, lambda: service.llm.sleep(level))
    log.info("the engine sleeps at level %d", level)
    return {"is_sleeping": service.llm.is_sleeping}


def _allowed(request: Request) -> Service:
    """The service. Raises 403 for a key that is no operator's."""
    service = service_of(request)
    service.keys.check_operator(tenant_of(request))
    return service
