"""`/metrics` for Prometheus. Needs no key, as in vLLM: it has numbers and the names of the server's own tools, no data of
requests and no name that a client chooses.
"""

import asyncio
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from jinfercept.engine.state import EngineState
from jinfercept.server.observe.engine_metrics import Reading, families
from jinfercept.server.observe.engine_snapshot import EngineSnapshot, SnapshotValue
from jinfercept.server.observe.metric_families import MetricFamilies
from jinfercept.server.service import Service

_FRESH_S = 1.0
"""Seconds for which an encoded page is reused: encoding takes milliseconds, and needs no key."""


def metrics_router(service: Service) -> APIRouter:
    """Router of one service. Uses no global registry."""
    router = APIRouter(tags=["operations"])
    window = EngineSnapshot(service.llm.engine.snapshot)
    text: Any = {"text/plain": {"schema": {"type": "string"}}}
    pages: dict[ModuleType, tuple[bytes, float]] = {}
    """By format: the last page, and when it was encoded, on the monotonic clock."""

    def last(form: ModuleType) -> bytes | None:
        page, encoded_s = pages.get(form, (None, 0.0))
        return page if time.monotonic() - encoded_s < _FRESH_S else None

    @router.get("/metrics", response_class=Response, responses={200: {"content": text}})
    async def metrics(request: Request) -> Response:
        """Counts, times and pages, for Prometheus."""
        form, kind = metrics_format(request.headers.get("accept", ""))
        if last(form) is None:
            looked = await window.look()
            if last(form) is None:  # no other request has encoded it meanwhile
                pages[form] = encode_metrics(form, collect(service, looked)), time.monotonic()
        return Response(pages[form][0], media_type=kind)

    return router


def metrics_format(accept: str) -> tuple[ModuleType, str]:
    """The module that encodes, and the content type: OpenMetrics 1.0.0 for clients that accept it, otherwise text 0.0.4."""
    for media_range in accept.lower().split(","):
        kind, *parameters = (part.replace(" ", "") for part in media_range.split(";"))
        versions = [
            value for name, _, value in (parameter.partition("=") for parameter in parameters) if name == "version"
        ]
        if kind == "application/openmetrics-text" and versions in ([], ["1.0.0"]):
            return openmetrics, openmetrics.CONTENT_TYPE_LATEST
    return exposition, exposition.CONTENT_TYPE_PLAIN_0_0_4


def collect(service: Service, looked: SnapshotValue[EngineState]) -> list[Metric]:
    """All metrics of a service. Runs on its event loop."""
    num_tasks = len(asyncio.all_tasks())
    tasks = MetricFamilies(service.names[0]).gauge("jinfercept:tasks", "Tasks of the server's event loop", num_tasks)
    reading = SnapshotValue(read(service, looked.seen), looked.at_s)
    return [*families(reading, service.names[0]), tasks]


def encode_metrics(form: ModuleType, metrics: list[Metric]) -> bytes:
    """A page of metrics. `form` is from `metrics_format`."""
    return form.generate_latest(SimpleNamespace(collect=lambda: metrics))  # in place of a registry


def read(service: Service, state: EngineState) -> Reading:
    """The numbers of an engine state, and those that do not change while the engine runs."""
    llm = service.llm
    plan, page_size = llm.memory_plan, llm.shape.page_size
    return Reading(
        state,
        page_size=page_size,
        num_devices=plan.num_devices,
        weight_bytes=plan.weight_bytes,
        token_bytes=plan.token_bytes(page_size),
        link_tokens_per_s=llm.profile.link_tokens(1.0),
        prefix_caching=llm.config.cache.enable_prefix_caching,
        pending_calls=service.pending_calls.total,
        refused=dict(service.refused),
        disk=llm.disk,
        is_sleeping=llm.is_sleeping,
    )
