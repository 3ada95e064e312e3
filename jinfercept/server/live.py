"""The live page at `/`, and `/live`, what it shows. The page is one file that needs nothing else and is open to all; the
numbers need a key where the server has keys, and a key sees its own requests. Of texts nothing is shown unless `--show-texts`
says so."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from jinfercept import __version__
from jinfercept.meter.live_state import live_state
from jinfercept.server.encoding import EncodedReply
from jinfercept.server.engine_snapshot import EngineSnapshot
from jinfercept.server.route import GuardedRoute
from jinfercept.server.service import Service

_FRESH_S = 0.1
"""Seconds for which one look serves all who see the same."""


def live_router(service: Service) -> APIRouter:
    """The numbers of one service."""
    router = APIRouter(route_class=GuardedRoute, tags=["operations"])
    windows: dict[
        str | None, EngineSnapshot[dict[str, Any]]
    ] = {}  # by whose requests it shows: at most one for each key

    @router.get("/live", response_model=dict[str, Any])
    async def live(request: Request, since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        """Which requests run, which are paused, where the pages are, what was decided: what the page at `/` shows. With a key
        these are its own requests, with an operator's all. Of the pool's history only what is younger than `since`, an `at_s`
        of an earlier answer.
        """
        owner = service.keys.watched_by(request.scope["jinfercept.key"])
        window = windows.setdefault(owner, EngineSnapshot(service, lambda: _seen(service, owner), _FRESH_S))
        seen = (await window.look()).seen
        history = [sample for sample in seen["history"] if sample["at_s"] > since]
        told = seen | {"history": history, "draining": service.draining}
        return EncodedReply(told, headers={"cache-control": "no-store"})

    return router


def page_router() -> APIRouter:
    """The page."""
    router = APIRouter()
    page = files("jinfercept.server").joinpath("live.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(page),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @router.get("/", include_in_schema=False)
    async def live_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return router


def _seen(service: Service, owner: str | None) -> dict[str, Any]:
    """What one owner of requests sees; None: an operator."""
    meter = service.llm.meter
    names = {"model": service.names[0], "policy": service.llm.config.scheduler.policy, "version": __version__}
    inbox = None if service.inbox is None else len(service.inbox.pending(owner))
    about = names | {"shows": "all" if owner is None else "own", "inbox": inbox}
    return about | live_state(meter, texts=service.options.show_texts, tenant=owner)


def _policy(page: str) -> str:
    """Nothing but the page's own script and style may run, and only this server be asked."""
    script, style = (_hash(re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(parts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)
