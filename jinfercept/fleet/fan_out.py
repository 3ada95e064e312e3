"""Requests that concern all replicas: `/health`, `/ready`, `/metrics`, `/inbox`, and `/live` of one of them."""

import json
import time
from collections.abc import Iterable, Iterator
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.metrics_core import Metric

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.front import FleetFront
from jinfercept.fleet.relay import lost_error
from jinfercept.fleet.replicas import HttpReply, ReplicaLostError, Ticket, Totals
from jinfercept.fleet.routing import NoReplicaError
from jinfercept.serve.observe.metrics import MetricFamilies, MetricsPage
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.protocols.errors import ApiError, shutting_down

_FRESH_S = 1.0
"""Seconds for which the replicas' health is reused: it needs no key."""
_COPIED = (b"content-type", b"cache-control")


def fan_out_router(front: FleetFront) -> APIRouter:
    router = APIRouter()
    healthy: tuple[int, float] = (0, -_FRESH_S)

    async def collected() -> list[Metric]:
        reports = await front.ask_all(partial(front.replicas.ask, "metrics"))
        own = front_metrics(front.routes.totals, len(reports), MetricFamilies(front.model))
        return [*merged(reports), *own]

    page = MetricsPage(collected)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics of all replicas, with the label `replica`, and of the front."""
        return await page.response()

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Whether at least one replica is healthy."""
        nonlocal healthy
        number, asked_s = healthy
        if not number or time.monotonic() - asked_s >= _FRESH_S:
            replies = await front.ask_all(lambda ticket: front.replicas.ask("reply", ticket, front.plain_call(request)))
            number = sum(reply.status == 200 for reply in replies)
            healthy = number, time.monotonic()
        if not number:
            raise ApiError(503, "no replica is healthy", code="no_replica")
        return EncodedReply({"status": "ok", "replicas": number})

    @router.get("/ready")
    async def ready(request: Request) -> Response:
        """Whether the fleet accepts requests."""
        if front.draining:
            raise shutting_down()
        if not front.routes.names:
            raise ApiError(503, "no replica runs", code="no_replica")
        return EncodedReply({"status": "ready", "replicas": len(front.routes.names)})

    @router.get("/inbox")
    async def inbox(request: Request) -> Response:
        """The waiting calls of all replicas, the oldest first."""
        front.check_key(request)
        replies = await front.ask_all(lambda ticket: front.replicas.ask("reply", ticket, front.plain_call(request)))
        if not replies:
            raise lost_error()
        answered = [reply for reply in replies if reply.status == 200]
        if not answered:
            return _response(replies[0])
        replied = [call for reply in answered for call in json.loads(reply.body)["data"]]
        return EncodedReply({"data": sorted(replied, key=lambda call: call["asked_at"])})

    @router.get("/live")
    async def live(request: Request, replica: str = "") -> Response:
        """The data of the live page of one replica: `replica`, or the first one by name."""
        front.check_key(request)
        names = sorted(front.routes.names)
        if replica and replica not in names:
            raise ApiError(404, f"no replica is named {replica[:80]!r}; available: {', '.join(names)}", param="replica")
        ticket = Ticket(front.routes, RoutingHint(), replica or next(iter(names), ""))
        try:
            return _response(await front.replicas.ask("reply", ticket, front.plain_call(request)))
        except (ReplicaLostError, NoReplicaError) as error:
            raise lost_error() from error

    return router


def merged(reports: Iterable[tuple[str, list[Metric]]]) -> list[Metric]:
    """The metrics of all replicas, by family; their samples get the label `replica`."""
    families: dict[str, Metric] = {}
    for name, metrics in reports:
        for metric in metrics:
            samples = [sample._replace(labels={**sample.labels, "replica": name}) for sample in metric.samples]
            if metric.name in families:
                families[metric.name].samples.extend(samples)
            else:
                metric.samples = samples
                families[metric.name] = metric
    return list(families.values())


def front_metrics(totals: Totals, num_replicas: int, make: MetricFamilies) -> Iterator[Metric]:
    yield make.gauge("jinfercept:replicas", "Replicas that answer", num_replicas)
    text = "Requests by replica and reason of their route: session, conversation, prefix, moved, spread, load"
    yield make.counter("jinfercept:routed_requests", text, totals.routed, "replica", "route")
    text = "Prompt tokens of answered requests by replica"
    yield make.counter("jinfercept:routed_prompt_tokens", text, totals.prompt_tokens, "replica")
    text = "Prompt tokens of answered requests that the replica held"
    yield make.counter("jinfercept:routed_found_tokens", text, totals.found_tokens, "replica")
    text = "Requests whose replica ended while it worked on them"
    yield make.counter("jinfercept:lost_requests", text, totals.lost)
    text = "Lost requests that were sent to another replica"
    yield make.counter("jinfercept:retried_requests", text, totals.retried)


def _response(reply: HttpReply) -> Response:
    headers = {name.decode(): value.decode("latin-1") for name, value in reply.headers if name in _COPIED}
    return Response(reply.body, reply.status, {**headers, "x-jinfercept-replica": reply.replica})
