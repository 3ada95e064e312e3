"""The start of one model on several hosts: who is who, whether all run the same, and JAX's own connection between them."""

import atexit
import hashlib
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import jax

from jinfercept.config import CHOICES, EngineConfig, EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.models.model_directory import is_hub_id
from jinfercept.runner.hosts.group import HostGroup, HostRunner, end_after_host_0, follow, meet
from jinfercept.runner.hosts.link import TOKEN_VARIABLE, Placement, place
from jinfercept.runner.hosts.wire import VERSION
from jinfercept.sched.plugins import label
from jinfercept.version import __version__

log = logging.getLogger("jinfercept")

_SHUTDOWN_S = 10
"""Seconds that JAX's processes wait for each other at the end."""
_OWN = frozenset({"hosts"})
"""Groups of options that need not be alike."""
_SAMPLE_BYTES = 1 << 16
"""Read at the beginning, in the middle and at the end of every file of a model."""
_SHOWN = 60


def placement_of(config: EngineConfig) -> Placement | None:
    """Where this process belongs; None for one that serves alone. Raises `ConfigError`."""
    placement = place(config.hosts)
    return None if placement is None or placement.num_hosts == 1 else placement


def is_follower(options: EngineOptions) -> bool:
    """Whether these options make this process another host than host 0. Raises `ConfigError`."""
    placement = placement_of(EngineConfig.from_options(options))
    return placement is not None and placement.host_id > 0


def join_hosts(placement: Placement, config: EngineConfig, model: Mapping[str, str]) -> HostGroup:
    """Meet the other hosts, and start JAX's connection with them. Call it before JAX's backend starts.

    All options but those of the placement have to be alike, and the facts of `model_facts`. From then on an error ends all
    processes of the group, see `HostGroup.failing`.

    Raises:
        ConfigError: the hosts do not come together, see `meet`.
    """
    facts, token = {**_facts(config), **model}, os.environ.get(TOKEN_VARIABLE, "")
    group = HostGroup(placement.host_id, *meet(placement, facts, token, config.hosts.host_timeout))
    atexit.register(group.close)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, with which a server drains
    with group.failing():
        _connect(placement, config.hosts.host_timeout)
    return group


def follow_to_the_end[Forward, Ticket](runner: HostRunner[Forward, Ticket], group: HostGroup) -> NoReturn:
    """Execute what host 0 plans. Raises `SystemExit` with status 0 when host 0 ends."""
    end_after_host_0(group)
    log.info("host %d executes what host 0 plans", group.host_id)
    follow(runner, group)
    disconnect()
    raise SystemExit(0)


def disconnect() -> None:
    """End JAX's connection between the hosts, which wait for each other for a moment."""
    with suppress(RuntimeError):  # another host may have ended before
        jax.distributed.shutdown()


def model_facts(model: object, source: Path | None, text: str) -> dict[str, str]:
    """A model's dimensions and samples of its files, which hosts compare. `model` is as `set_up` takes it."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    facts = {"model": text if len(text) < _SHOWN else f"{text[:_SHOWN]}… ({digest})"}
    if source is not None and isinstance(model, str) and is_hub_id(model):
        facts["revision"] = source.name
    elif source is not None:
        facts["files"] = _files_digest(source)
    return facts


def _connect(placement: Placement, timeout_s: float) -> None:
    try:
        jax.distributed.initialize(
            placement.coordinator,
            placement.num_hosts,
            placement.host_id,
            cluster_detection_method="deactivate",  # a process has all devices that it sees, under Slurm too
            initialization_timeout=int(timeout_s),
            shutdown_timeout_seconds=_SHUTDOWN_S,
            # the service listens on host 0 at this address alone
            coordinator_bind_address=placement.coordinator,
        )
    except RuntimeError as error:
        raise ConfigError(
            "JAX cannot connect the hosts",
            got=error,
            fix="make the LLM before anything else uses JAX, and give --coordinator a port that is free",
        ) from error


def _facts(config: EngineConfig) -> dict[str, str]:
    versions = {
        "jinfercept": __version__,
        "wire form": str(VERSION),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    options = {
        f"--{name.replace('_', '-')}": label(value) if name in CHOICES else str(value)
        for group, values in vars(config).items()
        if group not in _OWN
        for name, value in vars(values).items()
    }
    return versions | options


def _files_digest(source: Path) -> str:
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.relative_to(source)} {size}\n".encode())
        with path.open("rb") as file:
            for place in sorted({0, max(0, size // 2), max(0, size - _SAMPLE_BYTES)}):
                file.seek(place)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:16]
