"""`jinfercept deploy`: a fleet whose front runs behind Ray's proxies. Imports Ray when it runs."""

import signal
import sys
import threading
from typing import Any

from jinfercept.fleet.app_config import FleetConfig
from jinfercept.fleet.ray_start import ray_running
from jinfercept.server.serve import listen

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
