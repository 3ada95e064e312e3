"""Starts fleets on Ray: `jinfercept deploy`, whose front is behind Ray's proxies, and `jinfercept serve --replicas`, whose
front is in this process. Imports Ray when it runs.
"""

import asyncio
import os
import secrets
import signal
import sys
import threading
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

_END_S = 30.0
"""Seconds that Ray Serve may take to end, beside the drain."""


def deploy(config: FleetConfig, address: str | None) -> None:
    """Deploy a fleet, or update the one of the same name.

    Args:
        address: of a Ray cluster: returns when the fleet serves, which outlives this process. None: Ray is started on this
            machine, and the fleet serves until a signal.

    Raises:
        ConfigError: the port is in use, Ray is not installed or does not answer, or a replica cannot start.
    """
    if address is None:
        listener, url = listen(config.server)  # the port of 0, and whether it is free
        listener.close()
    else:
        url = f"http://{config.server.host}:{config.server.port}"
    ended = threading.Event()
    with ray_running(address) as folder:
        from jinfercept.fleet.ray_application import run_fleet

        if not run_fleet(config, folder):
            print(f"jinfercept: {config.name} runs as the file says", file=sys.stderr)
        print(f"jinfercept: {url}", flush=True)
        if address is not None:
            return
        before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            ended.wait()
            ending = threading.Thread(target=_end, args=(config.name,), daemon=True)
            ending.start()
            ending.join(config.server.drain_timeout + _END_S)  # then Ray ends with everything in it
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(name: str) -> None:
    """End an application when its requests in progress have ended, and then Ray Serve."""
    from ray import serve

    serve.delete(name)  # Ray Serve drains the front and the replicas; its shutdown does not
    serve.shutdown()


def application(args: dict[str, Any]) -> Any:
    """A fleet for Ray's own tools, such as KubeRay: `import_path: jinfercept.fleet.ray_deploy:application`.

    Args:
        args: contents of the file of `jinfercept deploy`.

    Returns:
        An application of Ray Serve.
    """
    from jinfercept.fleet.ray_application import bind_fleet

    return bind_fleet(FleetConfig.parse(args))


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
