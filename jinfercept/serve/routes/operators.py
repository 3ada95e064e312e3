"""What operators change while the server runs, with vLLM's names where it has them: adapters, where `--lora-dir` allows it;
pauses, sleep and new weights, where `--weights-dir` does.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from jinfercept.errors import EngineError, JinferceptError, RequestError
from jinfercept.llm import LLM
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service, service_of, tenant_of

log = logging.getLogger("jinfercept.serve")

lora_router = APIRouter(route_class=GuardedRoute, tags=["Adapters"])
weights_router = APIRouter(route_class=GuardedRoute, tags=["Weights"])

_TIMEOUT = Query(None, gt=0, le=10**7, description="seconds after which the engine goes on by itself")


class LoadAdapter(BaseModel):
    """An adapter to load. `lora_path` is a directory in that of `--lora-dir`, relative to it or absolute."""

    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
    lora_path: str = Field(min_length=1, max_length=1000)
    load_inplace: bool = False
    """Whether another adapter may have the name: it serves its requests to their ends, and this one those that come later."""


class UnloadAdapter(BaseModel):
    """An adapter to unload; requests that have it go on."""

    lora_name: str = Field(max_length=200)


@lora_router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadAdapter, request: Request) -> PlainTextResponse:
    """Load an adapter, whose name requests can give as their model from then on."""
    service, name = operators_service(request), body.lora_name
    if name in service.names:
        raise ApiError.bad(f"the model itself is named {name!r}; fix: give the adapter another name", "lora_name")
    directory = confined(Path(service.options.lora_dir or ""), body.lora_path, "lora_path", "--lora-dir")
    await service.prepare(request, lambda: service.llm.load_lora(name, directory, in_place=body.load_inplace))
    log.info("adapter %r was loaded from %s", name, directory)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")


@lora_router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(body: UnloadAdapter, request: Request) -> PlainTextResponse:
    """Take an adapter's name away. Its room is free when the last of its requests has ended."""
    service, name = operators_service(request), body.lora_name
    try:
        service.llm.unload_lora(name)
    except RequestError as error:
        raise ApiError(404, f"no adapter is named {name!r}", param="lora_name", code="model_not_found") from error
    log.info("adapter %r was unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")


def confined(folder: Path, path: str, field: str, flag: str) -> Path:
    """A directory in the folder that `flag` names, links followed. Raises 400 for any other, whether it exists or not."""
    root = folder.resolve()
    try:
        directory = (root / path).resolve()
        inside = directory.is_relative_to(root) and directory.is_dir()
        files = [file.resolve() for file in directory.iterdir()] if inside else []
    except (OSError, ValueError, RuntimeError):
        inside, directory, files = False, root, []
    if not inside or not all(file.is_relative_to(root) for file in files):
        raise ApiError.bad(f"the path must be a directory inside the server's {flag}", field)
    return directory


def operators_service(request: Request) -> Service:
    """The service of an operator's request. Raises 403 for a key that is no operator's."""
    service = service_of(request)
    service.keys.check_operator(tenant_of(request))
    return service


class WeightsUpdate(BaseModel):
    """A checkpoint of the same model. `path` is a directory in that of `--weights-dir`, relative to it or absolute."""

    path: str = Field(min_length=1, max_length=1000)
    mode: Literal["keep", "recompute", "abort"] = "recompute"
    """What becomes of unfinished requests, see `LLM.update_weights`."""


@weights_router.post("/pause")
async def pause(request: Request, timeout_s: float | None = _TIMEOUT) -> dict[str, bool]:
    """Run nothing until `/resume`, or for `timeout_s` seconds at most: requests wait, calls of tools go on."""
    return await sleep(request, 0, timeout_s)


@weights_router.post("/resume")
@weights_router.post("/wake_up")
async def resume(request: Request) -> dict[str, bool]:
    """Go on after `/pause` or `/sleep`."""
    return await _change(request, LLM.wake, None, "the engine goes on")


@weights_router.post("/sleep")
async def sleep(
    request: Request, level: int = Query(1, ge=0, le=2), timeout_s: float | None = _TIMEOUT
) -> dict[str, bool]:
    """Give memory of the device back: at level 1 the pages, at level 2 the weights too, which the host keeps."""
    return await _change(request, lambda llm: llm.sleep(level), timeout_s, f"the engine sleeps at level {level}")


@weights_router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether the engine waits for `/resume`."""
    return {"is_sleeping": operators_service(request).llm.is_sleeping}


@weights_router.post("/update_weights")
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
