"""Pauses, sleep and new weights, where `--weights-dir` allows them, with vLLM's names where it has them. For operators."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from jinfercept.errors import EngineError, JinferceptError
from jinfercept.llm import LLM
from jinfercept.server.routes.adapters import confined, operators_service
from jinfercept.server.routes.guarded_route import GuardedRoute

log = logging.getLogger("jinfercept.server")

router = APIRouter(route_class=GuardedRoute, tags=["Weights"])

_TIMEOUT = Query(None, gt=0, le=10**7, description="seconds after which the engine goes on by itself")


class WeightsUpdate(BaseModel):
    """A checkpoint of the same model. `path` is a directory in that of `--weights-dir`, relative to it or absolute."""

    path: str = Field(min_length=1, max_length=1000)
    mode: Literal["keep", "recompute", "abort"] = "recompute"
    """What becomes of unfinished requests, see `LLM.update_weights`."""


@router.post("/pause")
async def pause(request: Request, timeout_s: float | None = _TIMEOUT) -> dict[str, bool]:
    """Run nothing until `/resume`, or for `timeout_s` seconds at most: requests wait, calls of tools go on."""
    return await sleep(request, 0, timeout_s)


@router.post("/resume")
@router.post("/wake_up")
async def resume(request: Request) -> dict[str, bool]:
    """Go on after `/pause` or `/sleep`."""
    return await _change(request, LLM.wake, None, "the engine goes on")


@router.post("/sleep")
async def sleep(
    request: Request, level: int = Query(1, ge=0, le=2), timeout_s: float | None = _TIMEOUT
) -> dict[str, bool]:
    """Give memory of the device back: at level 1 the pages, at level 2 the weights too, which the host keeps."""
    return await _change(request, lambda llm: llm.sleep(level), timeout_s, f"the engine sleeps at level {level}")


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether the engine waits for `/resume`."""
    return {"is_sleeping": operators_service(request).llm.is_sleeping}


@router.post("/update_weights")
async def update_weights(body: WeightsUpdate, request: Request) -> dict[str, int]:
    """Serve the weights of a checkpoint from now on, without a wait for requests."""
    service = operators_service(request)
    directory = confined(Path(service.options.weights_dir or ""), body.path, "path", "--weights-dir")
    version = await service.prepare(request, lambda: service.llm.update_weights(directory, mode=body.mode))
    log.info("weights of version %d were read from %s", version, directory)
    return {"weights_version": version}


async def _change(
    request: Request, change: Callable[[LLM], None], timeout_s: float | None, note: str
) -> dict[str, bool]:
    """Let the engine sleep or wake. A sleep with `timeout_s` ends after so many seconds, whatever calls before it said."""
    service, loop = operators_service(request), asyncio.get_running_loop()

    def agreed() -> None:
        if service.waking is not None:
            service.waking.cancel()
        wakes = (loop.run_in_executor, None, _wake, service.llm)
        service.waking = None if timeout_s is None else loop.call_later(timeout_s, *wakes)

    def work() -> None:
        change(service.llm)
        loop.call_soon_threadsafe(agreed)  # also if the client has gone meanwhile

    await service.prepare(request, work)
    log.info(note)
    return {"is_sleeping": service.llm.is_sleeping}


def _wake(llm: LLM) -> None:
    log.warning("the engine goes on: there was no /resume within the timeout_s of its sleep")
    try:
        llm.wake()
    except (EngineError, JinferceptError) as error:
        log.warning("the engine sleeps on: %s", error)
