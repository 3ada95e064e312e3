"""Fleets on Ray: `jinfercept serve --replicas`, whose front is in this process, and an application for Ray's own tools, whose
front is behind Ray's proxies. Imports Ray when it runs.

Ray that the command starts listens on 127.0.0.1 only, apart from one gRPC port of each replica, and every request to it needs a
token that is made for this start. It ends with the command, even if that is killed.
"""

import asyncio
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from jinfercept.config import EngineConfig, EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.fleet.app_config import FleetConfig, check_server
from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.replicas import Replicas
from jinfercept.models.load import locate
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import listen, serve_app

HANDLE_VARIABLES = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # flow control between front and replica, and 1 ms less per message
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment of a process that has a front; read when `ray.serve` is imported."""
LOCAL_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's address is 127.0.0.1, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray runs its workers at 15
    "RAY_AUTH_MODE": "token",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment of a Ray on this machine."""
_PREFIX = "jinfercept-ray-"
_OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's smallest is 75 MiB; requests and responses do not go through it."""
log = logging.getLogger("jinfercept")

APPLICATION = "jinfercept"
_SECRET_BYTES = 32


def application(args: dict[str, Any]) -> Any:
    """A fleet for `serve run`, `serve deploy` and KubeRay, as an application of Ray Serve with the arguments of `FleetConfig`:
    `import_path: jinfercept.fleet.ray_deploy:application`."""
    from jinfercept.fleet.ray_application import bind_fleet

    return bind_fleet(FleetConfig.parse(args))


def serve_fleet(model: str, engine: EngineOptions, options: ServerOptions, num_replicas: int) -> None:
    """Serve a model with several replicas on this machine until a signal.

    Raises:
        ConfigError: an option is wrong, the port is in use, the database of the stored state cannot be used, Ray is not
            installed, or a replica cannot start.
        ModelError: the model cannot be found.
    """
    if num_replicas < 1:
        raise ConfigError("--replicas is too small", got=num_replicas, fix="at least 1")
    check_server(options)
    EngineConfig.from_options(engine)
    locate(model)
    listener, url = listen(options)
    if options.database_url() is not None:
        options.open_state().close()
    with ray_running() as folder:
        from ray import serve

        from jinfercept.fleet.ray_application import open_replicas, replica_options, run_replicas, scale_for
        from jinfercept.fleet.ray_replica import ReplicaSpec

        shared = replica_options(options, os.environ, folder)
        spec = ReplicaSpec(model, engine, shared, secrets.token_bytes(_SECRET_BYTES))
        log.info("starting Ray and %d replicas; each loads and compiles the model", num_replicas)
        run_replicas(APPLICATION, spec, scale_for(engine, num_replicas))

        async def connect() -> Replicas:
            return await open_replicas(APPLICATION)

        async def end() -> None:
            await asyncio.to_thread(serve.shutdown)

        front = FleetFront(connect, options, model)
        app = create_front(front, fan_out_router(front), end=end)
        serve_app(app, front, listener, lambda: print(f"jinfercept: {url}", flush=True))


@contextmanager
def ray_running() -> Iterator[str]:
    """Ray on this machine, until the end. Yields a folder that only this user may enter, for what the replicas share.

    Raises:
        ConfigError: Ray is not installed, or the temporary folder cannot be private.
    """
    for name, value in HANDLE_VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.update(LOCAL_VARIABLES)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(
            "several replicas need more packages", got=f"no package {error.name}", fix="pip install 'jinfercept[fleet]'"
        ) from error
    import ray

    folder = _make_private_folder()
    try:
        ray.init(
            logging_level=logging.WARNING,
            num_cpus=1,  # its scheduler's; replicas take none
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "r"),  # a folder inside, since Ray opens the one that it is given to all users
            _node_ip_address="127.0.0.1",
        )
        yield str(folder)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def is_private(folder: Path) -> bool:
    """Whether a path is a folder, not a link to one, that belongs to this user and that no other user may enter."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _make_private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    if not is_private(folder):
        folder.rmdir()
        raise ConfigError(
            "a temporary folder is open to other users",
            got=f"{folder.parent}, whose file system keeps no permissions",
            fix="set TMPDIR to a folder of a file system that does",
        )
    return folder
