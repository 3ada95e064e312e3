"""The application of Ray Serve: replicas, the handle that reaches them, and a front here or as an ingress. Imports Ray."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, final

import grpc
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.fleet.app_config import FleetConfig, replicas_by_memory
from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.ray_deploy import HANDLE_VARIABLES
from jinfercept.fleet.ray_replica import EngineReplica, ReplicaSpec
from jinfercept.fleet.replicas import HttpCall, Messages, ReplicaLostError, Replicas, Ticket
from jinfercept.fleet.routing import NoReplicaError
from jinfercept.serve.observe.log_lines import begin_logging
from jinfercept.serve.options import KEY_VARIABLE, ServerOptions

REPLICAS, FRONT = "Replica", "Front"
_REPORT_S = 1.0
_HEALTH_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
_QUIET = {"log_level": "ERROR", "enable_access_log": False}
log = logging.getLogger("jinfercept.serve")


@dataclass(frozen=True)
class Scale:
    """How many replicas, and what each of them takes: the processors that Ray's scheduler counts, and its GPUs."""

    least: int
    most: int
    cpus: float = 0.0
    gpus: int = 0

    def options(self, drain_timeout_s: float) -> dict[str, Any]:
        """Options of the replicas' deployment. A replica with GPUs is placed on one node, in a group of one bundle."""
        resources = {"num_cpus": self.cpus, **({"num_gpus": self.gpus} if self.gpus else {})}
        options: dict[str, Any] = {
            "ray_actor_options": resources,
            "graceful_shutdown_timeout_s": drain_timeout_s + 15.0,
            "graceful_shutdown_wait_loop_s": 0.5,
        }
        if self.gpus > 1:
            options["placement_group_bundles"] = [{"CPU": max(1.0, self.cpus), "GPU": self.gpus}]
            options["placement_group_strategy"] = "STRICT_PACK"
            resources["num_cpus"] = max(1.0, self.cpus)
        if self.least == self.most:
            options["num_replicas"] = self.least
        else:
            options["autoscaling_config"] = AutoscalingConfig(
                min_replicas=self.least,
                max_replicas=self.most,
                policy=AutoscalingPolicy(policy_function=replicas_by_memory),
            )
        return options


def scale_for(engine: EngineOptions, num_replicas: int) -> Scale:
    """A fixed number of replicas; each takes the GPUs of its tensor parallelism if the cluster has GPUs at all."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return Scale(num_replicas, num_replicas, gpus=(engine.get("tensor_parallel_size") or 1) if has_gpus else 0)


def replica_options(options: ServerOptions, environment: Mapping[str, str], folder: str | None = None) -> ServerOptions:
    """Options of a replica's server.

    The front checks hosts, and answers for other origins. A key and a database of the environment go along, since a replica may
    have another one. Without a database the replicas of one machine share stored responses in `folder`, or none.
    """
    key = environment.get(KEY_VARIABLE)
    keys = options.api_key if key is None or key in options.operator_key else (*options.api_key, key)
    state = options.database_url() or (None if folder is None else f"sqlite:///{folder}/state.sqlite")
    return replace(options, api_key=keys, allowed_hosts=("*",), allowed_origins=(), state_url=state)


def bind_replicas(spec: ReplicaSpec, scale: Scale) -> Any:
    config: Any = RequestRouterConfig
    server = spec.server
    return _deployment(
        EngineReplica,
        name=REPLICAS,
        max_ongoing_requests=server.max_connections + server.max_queue_len + server.max_background_responses,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        max_constructor_retry_count=2,
        request_router_config=config(request_router_class=ConversationRouter, request_routing_stats_period_s=_REPORT_S),
        **scale.options(spec.server.drain_timeout),
    ).bind(spec)


def bind_fleet(config: FleetConfig) -> Any:
    """The application of Ray's own tools: replicas, and a front as the ingress of Ray's proxies."""
    server = config.server
    spec = ReplicaSpec(config.model, config.engine, replica_options(server, os.environ), config.secret)
    scale = scale_for(config.engine, config.replicas.min)
    scale = replace(scale, most=config.replicas.max, cpus=config.cpus_per_replica)
    return _deployment(
        serve.ingress(ToFront())(RayFront),
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=server.drain_timeout + 10.0,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": HANDLE_VARIABLES}},
    ).bind(bind_replicas(spec, scale), config.model, server)


def run_replicas(name: str, spec: ReplicaSpec, scale: Scale) -> None:
    """Deploy replicas alone, without Ray's proxies, for a front in this process. Raises `ConfigError`."""
    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # errors are raised
    try:
        serve.run(bind_replicas(spec, scale), name=name, route_prefix=None)
    except RuntimeError as error:
        raise ConfigError("a replica cannot start", got=_cause(name) or error, fix="see the line before it") from error


def _deployment(target: Any, **options: Any) -> Any:
    deployment: Any = serve.deployment  # its overloads hide what it returns
    return deployment(target, logging_config=_QUIET, **options)


def _cause(name: str) -> str:
    application = serve.status().applications.get(name)
    lines = [
        line.strip()
        for deployment in (application.deployments.values() if application else ())
        for line in deployment.message.splitlines()
        if "jinfercept: " in line or "Error" in line
    ]
    return lines[-1].rpartition("jinfercept: ")[2] if lines else ""


async def open_replicas(name: str) -> "RayReplicas":
    return RayReplicas(await asyncio.to_thread(serve.get_deployment_handle, REPLICAS, name))


@final
class RayFront:
    """The ingress: a front in an actor of Ray Serve."""

    async def __init__(self, handle: DeploymentHandle[Any], model: str, options: ServerOptions) -> None:
        begin_logging(options.log_format)

        async def connect() -> Replicas:
            return RayReplicas(handle)

        self.front = FleetFront(connect, options, model)
        self.application = create_front(self.front, fan_out_router(self.front))
        await self.front.start()

    async def __del__(self) -> None:
        await self.front.drain(0.0)


@final
class ToFront:
    """The application of the ingress, which Ray Serve calls inside its actor: a function would be a builder to it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            front: Any = serve.get_replica_context().servable_object
            await front.application(scope, receive, send)
            return
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})


@final
class ConversationRouter(RequestRouter):
    """Chooses the replica that a request's ticket names; if that one cannot be reached, any other."""

    queue_len_response_deadline_s = 1.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best one first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before it is asked again; otherwise Ray spins
        ticket = _ticket(pending_request)
        if ticket is None:
            return [list(candidate_replicas)]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            chosen = by_name.pop(ticket.choose({name: replica.routing_stats for name, replica in by_name.items()}))
        except Exception:  # Ray would leave the request without an answer
            log.exception("no route was found")
            return [list(candidate_replicas)]
        return [[chosen], list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        ticket = _ticket(pending_request)
        if ticket is not None:
            ticket.taken(replica_id.unique_id)


def _ticket(request: PendingRequest | None) -> Any:
    return None if request is None else request.kwargs.get("ticket")


@final
class RayReplicas:
    """See `Replicas`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._questions = handle.options(method_name="ask")
        self._stream = handle.options(stream=True, method_name="answer")

    async def answer(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages]:
        with _errors():
            response: Any = _alone(lambda: self._stream.remote(call, ticket=ticket))
            try:
                async for messages in response:
                    yield messages
            finally:
                response.cancel()

    async def ask(self, method: str, ticket: Ticket, *arguments: Any) -> Any:
        with _errors():
            return await _alone(lambda: self._questions.remote(method, arguments, ticket=ticket))


def _alone[T](call: Callable[[], T]) -> T:
    """Make a call outside of the HTTP request that an ingress works on.

    Ray Serve gives the calls of one request one id, and its router finds a waiting call by that id: of two at once it would
    find one only. These calls are cancelled here, so nothing is lost.
    """
    return Context().run(call)


@contextmanager
def _errors() -> Iterator[None]:
    """Raises Ray's errors as those of `Replicas`."""
    try:
        yield
    except DeploymentUnavailableError as error:
        raise NoReplicaError(str(error)) from error
    except (RayActorError, RequestCancelledError, grpc.RpcError) as error:
        raise ReplicaLostError(str(error)) from error
