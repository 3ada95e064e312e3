"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, where `--lora-dir` allows them: as in vLLM, while the server runs."""

import logging
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from jinfercept.errors import RequestError
from jinfercept.protocols.errors import ApiError
from jinfercept.server.routes.guarded_route import GuardedRoute
from jinfercept.server.service import Service, service_of, tenant_of

log = logging.getLogger("jinfercept.server")

router = APIRouter(route_class=GuardedRoute, tags=["Adapters"])


class LoadAdapter(BaseModel):
    """An adapter to load. `lora_path` is a directory in that of `--lora-dir`, relative to it or absolute."""

    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
    lora_path: str = Field(min_length=1, max_length=1000)
    load_inplace: bool = False
    """Whether another adapter may have the name: it serves its requests to their ends, and this one those that come later."""


class UnloadAdapter(BaseModel):
    """An adapter to unload; requests that have it go on."""

    lora_name: str = Field(max_length=200)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadAdapter, request: Request) -> PlainTextResponse:
    """Load an adapter, whose name requests can give as their model from then on."""
    service, name = operators_service(request), body.lora_name
    if name in service.names:
        raise ApiError.bad(f"the model itself is named {name!r}; fix: give the adapter another name", "lora_name")
    directory = confined(Path(service.options.lora_dir or ""), body.lora_path, "lora_path", "--lora-dir")
    await service.prepare(request, lambda: service.llm.load_lora(name, directory, in_place=body.load_inplace))
    log.info("adapter %r was loaded from %s", name, directory)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
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
    """A directory in the folder, links followed. Raises 400 for any other; whether that exists remains unsaid.

    Args:
        path: as the field of the body has it.
        flag: that names the folder.
    """
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
    """The service that a request of an operator was sent to. Raises 403 for a key that is no operator's."""
    service = service_of(request)
    service.keys.check_operator(tenant_of(request))
    return service
