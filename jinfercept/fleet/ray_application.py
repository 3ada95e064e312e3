"""The application of Ray Serve: replicas, and a front in the command's process or as an ingress. Imports Ray."""

import asyncio
from dataclasses import dataclass
from typing import Any, final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.ray_autoscaling import replicas_by_memory
from jinfercept.fleet.ray_handle import RayReplicas
from jinfercept.fleet.ray_replica import EngineReplica, ReplicaSpec
from jinfercept.fleet.ray_router import ConversationRouter
from jinfercept.fleet.ray_start import HANDLE_VARIABLES
from jinfercept.fleet.replicas import Replicas

REPLICAS = "Replica"
_REPORT_S = 1.0
_HEALTH_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
_QUIET = {"log_level": "ERROR", "enable_access_log": False}


@dataclass(frozen=True)
class Scale:
    """How many replicas, and what each of them takes.

    Attributes:
        least, most: replicas; a fixed number if they are equal.
        cpus: that Ray's scheduler counts for a replica.
        gpus: of a replica, which are those of its tensor parallelism.
    """

    least: int
    most: int
    cpus: float = 0.0
    gpus: int = 0

    def options(self, drain_timeout_s: float) -> dict[str, Any]:
        """Options of the replicas' deployment.

        A replica with GPUs is placed on one node, in a placement group of one bundle.
        """
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


def run_application(name: str, spec: ReplicaSpec, scale: Scale, *, ingress: bool, route_prefix: str = "/") -> None:
    """Deploy an application, or update one that runs: Ray Serve then replaces its replicas one after the other.

    Args:
        name: of the application.
        spec: what replicas serve.
        scale: how many there are.
        ingress: also deploy a front behind Ray's proxy, at `route_prefix`; otherwise Ray's proxy is not started.

    Raises:
        ConfigError: a replica cannot start.
    """
    serve.start(
        http_options={"host": spec.server.host, "port": spec.server.port},
        proxy_location="EveryNode" if ingress else "Disabled",
        logging_config=_QUIET,
    )
    deployment: Any = serve.deployment  # its overloads hide what it returns
    config: Any = RequestRouterConfig
    replicas = deployment(
        EngineReplica,
        name=REPLICAS,
        max_ongoing_requests=spec.server.max_connections + spec.server.max_queue_len,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        max_constructor_retry_count=2,
        logging_config=_QUIET,
        request_router_config=config(request_router_class=ConversationRouter, request_routing_stats_period_s=_REPORT_S),
        **scale.options(spec.server.drain_timeout),
        **({"version": spec.version} if spec.version else {}),
    ).bind(spec)
    application: Any = replicas
    if ingress:
        application = deployment(
            serve.ingress(_to_front)(RayFront),
            name="Front",
            num_replicas=1,
            max_ongoing_requests=spec.server.max_connections,
            graceful_shutdown_timeout_s=spec.server.drain_timeout + 10.0,
            logging_config=_QUIET,
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": HANDLE_VARIABLES}},
        ).bind(replicas, spec)
    try:
        serve.run(application, name=name, route_prefix=route_prefix if ingress else None)
    except RuntimeError as error:
        raise ConfigError("a replica cannot start", got=_cause(name) or error, fix="see the line before it") from error


def _cause(name: str) -> str:
    """What a failed replica says, in one line."""
    application = serve.status().applications.get(name)
    lines = [
        line.strip()
        for deployment in (application.deployments.values() if application else ())
        for line in deployment.message.splitlines()
        if "jinfercept: " in line or "Error" in line
    ]
    return lines[-1].rpartition("jinfercept: ")[2] if lines else ""


async def open_replicas(name: str) -> RayReplicas:
    """The replicas of an application that runs, for a front on this event loop."""
    return RayReplicas(await asyncio.to_thread(serve.get_deployment_handle, REPLICAS, name))


def runs(name: str) -> bool:
    """Whether an application of this name is deployed."""
    return name in serve.status().applications


@final
class RayFront:
    """The ingress: a front in an actor of Ray Serve."""

    async def __init__(self, handle: DeploymentHandle[Any], spec: ReplicaSpec) -> None:
        async def connect() -> Replicas:
            return RayReplicas(handle)

        self.front = FleetFront(connect, spec.server, spec.model)
        self.app = create_front(self.front, fan_out_router(self.front))
        await self.front.start()

    async def __del__(self) -> None:
        await self.front.drain(0.0)


async def _to_front(scope: Any, receive: Any, send: Any) -> None:
    """The application of the ingress, which Ray Serve calls inside its actor."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    front: Any = serve.get_replica_context().servable_object
    await front.app(scope, receive, send)
