"""The live page at `/`, and its data at `/live`.

The page is one file that loads nothing else and needs no key. The data need a key if the server has keys, and a key sees its
own requests. Texts are hidden without `--show-texts`.
"""

import base64
import hashlib
import re
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.engine.state import live_state
from jinfercept.serve.observe.metrics import EngineSnapshot
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service
from jinfercept.version import __version__

_FRESH_S = 0.1
"""Seconds for which one snapshot is the answer to all requests of the same view."""
_FORBIDDEN = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def live_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute, tags=["operations"])
    snapshots = dict[str | None, EngineSnapshot[dict[str, Any]]]()  # by tenant, at most one for each key

    @router.get("/live", response_model=dict[str, Any])
    async def live(request: Request, since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        """Running and paused requests, residency of pages, decisions: the data of the page at `/`. A key sees its own
        requests, an operator's key all. The pool's history has the samples after `since`, an `at_s` of an earlier answer.
        """
        tenant = service.keys.watched_by(request.scope["jinfercept.key"])
        new = EngineSnapshot(lambda: service.llm.engine.ask(lambda stats: _seen(service, stats, tenant)), _FRESH_S)
        snapshot = snapshots.setdefault(tenant, new)
        seen = (await snapshot.look()).seen
        history = [sample for sample in seen["history"] if sample["at_s"] > since]
        data = seen | {"history": history, "draining": service.draining}
        return EncodedReply(data, headers={"cache-control": "no-store"})

    return router


def page_router() -> APIRouter:
    router = APIRouter()
    page = files("jinfercept.serve.observe").joinpath("live.html").read_text(encoding="utf-8")
    inline = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style"))
    script, style = (" ".join(map(_allowed_source, texts)) for texts in inline)
    own = f"script-src {script}; style-src {style}; connect-src 'self'; img-src data:"
    headers = {
        "content-security-policy": f"default-src 'none'; {own}; {_FORBIDDEN}",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @router.get("/", include_in_schema=False)
    async def live_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return router


def _allowed_source(text: str) -> str:
    """The source expression of a content security policy that allows an inline script or style with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _seen(service: Service, stats: EngineStats, tenant: str | None) -> dict[str, Any]:
    names = {"model": service.names[0], "policy": service.llm.policy_name, "version": __version__}
    inbox = None if service.inbox is None else len(service.inbox.pending(tenant))
    plan, state = service.llm.memory_plan, service.llm.disk
    devices = {"count": plan.num_devices, "weight_bytes": plan.weight_bytes, "kv_bytes": plan.kv_bytes}  # of each
    disk = state and {"works": state.works, **state.occupancy._asdict(), **asdict(state.counters)}
    about = names | {"devices": devices, "disk": disk, "shows": "all" if tenant is None else "own", "inbox": inbox}
    return about | live_state(stats, texts=service.options.show_texts, tenant=tenant)
