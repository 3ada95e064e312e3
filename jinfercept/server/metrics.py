"""`/metrics`: what Prometheus collects. Open to all, as vLLM's: it has numbers, and names of the
server's own tools, but nothing of requests and no name that a client chooses."""

import asyncio
import copy
from typing import Any, final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from jinfercept.server.exposition import Reading, families
from jinfercept.server.named import Named
from jinfercept.server.service import Service
from jinfercept.server.window import Window


def metrics_router(service: Service) -> APIRouter:
    """The route of one service. Nothing is registered anywhere else."""
    router = APIRouter(tags=["operations"])
    window = Window(service, lambda: read(service))
    text: Any = {"text/plain": {"schema": {"type": "string"}}}

    @router.get("/metrics", response_class=Response, responses={200: {"content": text}})
    async def metrics(request: Request) -> Response:
        """Counts, times and pages, for Prometheus."""
        looked = await window.look()
        tasks = Named(service.names[0]).gauge(
            "jinfercept:tasks", "Tasks of the server's event loop", len(asyncio.all_tasks())
        )
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(_Collected([*families(looked, service.names[0]), tasks])), media_type=kind)

    return router


def read(service: Service) -> Reading:
    """All that is shown, as it is now. To be asked between two steps."""
    llm = service.llm
    meter, engine, store = llm.meter, llm.engine, llm.engine.scheduler.kv.store
    states = {
        "running": len(meter.running),
        "waiting": engine.num_waiting,
        "intercepted": len(engine.scheduler.intercepted) - engine.num_kept,
        "kept": engine.num_kept,
    }
    plan = llm.memory_plan
    return Reading(
        counts=meter.read(),
        counters=copy.copy(llm.counters),
        pages=meter.pages(),
        states=states,
        page_size=store.page_size,
        num_device_pages=store.occupancy().total,
        num_host_pages=store.num_host_pages,
        token_bytes=plan.kv_bytes // (plan.kv_tokens + store.page_size),
        link_tokens_per_s=llm.profile.link_tokens(1.0),
        prefix_caching=llm.config.cache.enable_prefix_caching,
    )


@final
class _Collected:
    """What an encoder takes for a registry."""

    def __init__(self, collected: list[Metric]) -> None:
        self._collected = collected

    def collect(self) -> list[Metric]:
        """All of it."""
        return self._collected
