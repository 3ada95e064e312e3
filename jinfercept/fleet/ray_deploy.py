"""Fleets on Ray: `jinfercept serve --replicas`, whose front is in this process, and an application for Ray's own tools, whose
front is behind Ray's proxies. Imports Ray when it runs.
"""

import asyncio
import logging
import os
import secrets
import sys
from typing import Any

from jinfercept.config import EngineConfig, EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.fleet.app_config import FleetConfig, check_server
from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.ray_start import ray_running
from jinfercept.fleet.replicas import Replicas
from jinfercept.models.load import locate
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import listen, serve_app


def application(args: dict[str, Any]) -> Any:
    """A fleet for `serve run`, `serve deploy` and KubeRay: `import_path: jinfercept.fleet.ray_deploy:application`.

    Args:
        args: see `FleetConfig`.

    Returns:
        An application of Ray Serve.
    """
    from jinfercept.fleet.ray_application import bind_fleet

    return bind_fleet(FleetConfig.parse(args))


log = logging.getLogger("jinfercept")

APPLICATION = "jinfercept"
_SECRET_BYTES = 32


def serve_fleet(
    model: str, engine: EngineOptions, options: ServerOptions, num_replicas: int, address: str | None
) -> None:
    """Serve a model with several replicas until a signal.

    Args:
        model: as on the command line.
        num_replicas: at least 1.
        address: of a Ray cluster, whose replicas outlive this process and are found again by the next one; None: Ray is
            started on this machine, and ends with this process.

    Raises:
        ConfigError: an option is wrong, the port is in use, the database of the stored state cannot be used, Ray is not
            installed or does not answer, or a replica cannot start.
        ModelError: the model cannot be found.
    """
    if num_replicas < 1:
        raise ConfigError("--replicas is too small", got=num_replicas, fix="at least 1")
    check_server(options)
    EngineConfig.from_options(engine)
    locate(model)
    listener, url = listen(options)
    if address is None and options.database_url() is not None:  # nodes of a cluster may have other files
        options.open_state().close()
    with ray_running(address) as folder:
        from ray import serve

        from jinfercept.fleet.ray_application import open_replicas, replica_options, run_replicas, runs, scale_for
        from jinfercept.fleet.ray_replica import ReplicaSpec

        if address is None or not runs(APPLICATION):
            shared = replica_options(options, os.environ, folder)
            spec = ReplicaSpec(model, engine, shared, secrets.token_bytes(_SECRET_BYTES))
            log.info("starting Ray and %d replicas; each loads and compiles the model", num_replicas)
            run_replicas(APPLICATION, spec, scale_for(engine, num_replicas))
        else:
            print(f"jinfercept: the application {APPLICATION} runs there already, as it was deployed", file=sys.stderr)

        async def connect() -> Replicas:
            return await open_replicas(APPLICATION)

        async def end() -> None:
            if address is None:
                await asyncio.to_thread(serve.shutdown)

        front = FleetFront(connect, options, model)
        app = create_front(front, fan_out_router(front), end=end)
        serve_app(app, front, listener, lambda: print(f"jinfercept: {url}", flush=True))
