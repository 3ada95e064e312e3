"""Ray on this machine for one command, or a cluster's that runs already. Imports Ray when it starts it.

Ray that the command starts listens on 127.0.0.1 only, apart from one gRPC port of each replica, and every request to it needs a
token that is made for this start. It ends with the command, even if that is killed.
"""

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

from jinfercept.errors import ConfigError

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


def require_ray() -> None:
    """Raise `ConfigError` if Ray Serve is not installed."""
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(
            "several replicas need more packages", got=f"no package {error.name}", fix="pip install 'jinfercept[fleet]'"
        ) from error


@contextmanager
def ray_running(address: str | None) -> Iterator[str | None]:
    """Connect to Ray, and disconnect at the end.

    Args:
        address: of a cluster; None: start Ray on this machine, and end it at the end with everything in it.

    Yields:
        A folder that only this user may enter, for what the replicas of a local Ray share; it is removed at the end. None for a
        cluster.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or the temporary folder cannot be private.
    """
    for name, value in HANDLE_VARIABLES.items():
        os.environ.setdefault(name, value)
    with _prepared(address) as (folder, arguments):
        require_ray()
        import ray

        try:
            ray.init(address, logging_level=logging.WARNING, **arguments)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                "no Ray cluster answers at this address",
                got=f"--ray-address {address}: {error}",
                fix="auto, or HOST:PORT of its head",
            ) from error
        try:
            yield folder
        finally:
            ray.shutdown()


def is_private(folder: Path) -> bool:
    """Whether a path is a folder, not a link to one, that belongs to this user and that no other user may enter."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _make_private_folder() -> Path:
    """A new folder with a short path, which Ray's sockets need.

    Raises:
        ConfigError: the file system keeps no permissions.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    if not is_private(folder):
        folder.rmdir()
        raise ConfigError(
            "a temporary folder is open to other users",
            got=f"{folder.parent}, whose file system keeps no permissions",
            fix="set TMPDIR to a folder of a file system that does",
        )
    return folder


@contextmanager
def _prepared(address: str | None) -> Iterator[tuple[str | None, dict[str, Any]]]:
    if address is not None:
        yield None, {"log_to_driver": False}
        return
    os.environ.update(LOCAL_VARIABLES)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_ADDRESS", None)
    folder = _make_private_folder()
    try:
        yield (
            str(folder),
            {
                "num_cpus": 1,  # its scheduler's; replicas take none
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": str(
                    folder / "r"
                ),  # a folder inside, since Ray opens the one that it is given to all users
                "_node_ip_address": "127.0.0.1",
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
