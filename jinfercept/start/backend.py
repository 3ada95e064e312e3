"""JAX before and when its backend starts: environment variables, the compilation cache, and the devices that serve a model."""

import logging
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import jax
from jax.sharding import Mesh

from jinfercept.config import EngineConfig, ModelOptions
from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.machine import memory, num_processors
from jinfercept.errors import ConfigError, describe_failure, shown
from jinfercept.models.embedded import cache_directory
from jinfercept.models.jax_settings import check_settings
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model
from jinfercept.models.protocol import CutModel, ServedModel
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.layouts.interleaved import INTERLEAVED_ON
from jinfercept.start.memory import (
    GIB,
    HOST_MARGIN,
    HOST_SHARE,
    PINNED_LIMIT,
    PINNED_MARGIN_GIB,
    PREALLOCATE,
    arrays_per_copy,
)

log = logging.getLogger(__name__)


def prepare_backend(config: EngineConfig, *, swap_is_given: bool = False) -> None:
    """Set environment variables, and settings of JAX, before its backend starts. Values of the user stay.

    Every change is logged at INFO. `swap_is_given` says that `swap_space` is the user's choice.
    """
    # A GPU's memory is taken at once, in one region, if the KV pool takes all that is left of it. With `kv_tokens`, which says
    # how large the pool is, memory is taken as it is needed.
    variables = {PREALLOCATE: "true" if config.cache.kv_tokens is None else "false"}
    variables |= _pinned_memory(config, is_given=swap_is_given)
    if config.advanced.async_dispatch:
        variables["PJRT_GPU_ENABLE_ASYNC_DISPATCH"] = "1"
    num_devices, processors = config.model.tensor_parallel_size or 1, num_processors()
    if processors < (os.cpu_count() or 1):
        # threads of XLA; this process may use fewer cores than there are
        variables["NPROC"] = str(processors)
    if num_devices > 1 and processors < 2 * num_devices:
        # CPU devices that wait for each other occupy a thread, and XLA ends a process whose last device finds none for a minute
        variables["NPROC"] = str(2 * num_devices)
    if config.model.dtype == "bfloat16" and num_devices == 1 and native.features():
        # as many threads as there are cores, less one, since the thread that calls a CPU's kernel computes too
        variables["NPROC"] = str(max(1, native.num_threads() - 1))
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # jaxlib refuses to see both
        variables["XLA_CLIENT_MEM_FRACTION"] = str(config.cache.gpu_memory_utilization)
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    if added:
        log.info("set environment variables of JAX: %s", ", ".join(f"{name}={value}" for name, value in added.items()))
    if config.advanced.compilation_cache and jax.config.jax_compilation_cache_dir is None:
        directory = cache_directory() / "xla"
        drop_damaged(directory)
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        log.info("set JAX's compilation cache to %s, for executables of any size", directory)


def _pinned_memory(config: EngineConfig, *, is_given: bool) -> dict[str, str]:
    cache, free = config.cache, memory().available
    # Room for the copies of pages, twice theirs in arrays of several pages, of which up to a half may be empty; at most half of
    # the memory that the machine has left, unless `swap_space` is the user's choice and fits.
    limit_gib = math.ceil(cache.swap_space * arrays_per_copy(config.advanced)) + PINNED_MARGIN_GIB
    if limit_gib * GIB > (free - HOST_MARGIN if is_given else free / HOST_SHARE):
        limit_gib = max(PINNED_MARGIN_GIB, free // HOST_SHARE // GIB)
    settings = {PINNED_LIMIT: str(limit_gib)}
    # All of it is pinned at the first use of some, at the start, so that no step waits for the system to pin pages: unless the
    # limit is the user's, who may have meant no more than a limit.
    if cache.swap_space and config.advanced.pinned_memory and PINNED_LIMIT not in os.environ:
        settings["XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"] = "true"
    return settings


def start_backend(attention: str) -> None:
    """Start JAX's default backend. Raises `ConfigError` if it does not start, or cannot run this kind of attention."""
    check_settings()
    try:
        ModelMesh.default()
        platform = jax.default_backend()
    except Exception as error:  # of JAX, or of the plugin of a platform
        raise ConfigError(
            "JAX's backend does not start",
            got=f"JAX_PLATFORMS={jax.config.jax_platforms}: {describe_failure(error)}"[:500],
            fix="name a platform that is installed: JAX_PLATFORMS=cpu, or pip install 'jinfercept[cuda13]' or '[tpu]'",
        ) from error
    if attention in gpu_kernels.ATTENTION and platform != "gpu":
        raise ConfigError(f"attention={attention} is a GPU's", got=f"JAX on a {platform}", fix="attention=auto, or cpu")
    if attention == "tpu" and platform not in INTERLEAVED_ON:
        raise ConfigError("attention=tpu needs a TPU", got=f"JAX on a {platform}", fix="attention=auto")


_ENTRIES, _STAMP = "*-cache", ".checked"
_ZSTD = b"\x28\xb5\x2f\xfd"
_WRITING_S = 60.0
"""Age of an entry below which another process may still write it."""


def drop_damaged(directory: Path) -> list[Path]:
    """Delete the entries that cannot be unpacked, each with a warning; returns them. A read-only directory stays as it is."""
    dropped = list[Path]()
    if not os.access(directory, os.W_OK):
        return dropped
    began_s = time.time()
    with suppress(OSError):  # another process may delete too
        # entries of the last minute are left to the next check
        for entry in _new_entries(directory, began_s - _WRITING_S):
            if not _unpacks(entry.read_bytes()):
                entry.unlink()
                dropped.append(entry)
                log.warning("dropped a damaged entry of JAX's compilation cache, which is compiled again: %s", entry)
        stamp = directory / _STAMP
        stamp.touch()
        os.utime(stamp, (began_s - _WRITING_S, began_s - _WRITING_S))
    return dropped


def _new_entries(directory: Path, until_s: float) -> Iterator[Path]:
    stamp = directory / _STAMP
    since_s = stamp.stat().st_mtime if stamp.is_file() else 0.0
    return (entry for entry in directory.glob(_ENTRIES) if since_s <= entry.stat().st_mtime < until_s)


def _unpacks(entry: bytes) -> bool:
    # JAX packs with zlib, or, where it is installed, with zstandard: not checked.
    try:
        zlib.decompress(entry)
    except zlib.error:
        return entry.startswith(_ZSTD)
    return True


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@final
class CompileCounter:
    """Counts XLA compilations of the process from its creation on: `count`, of which `cached` were found on disk."""

    def __init__(self) -> None:
        self.count = self.cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_for_hits)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILE_EVENT

    def _listen_for_hits(self, event: str, **_: str | int) -> None:
        self.cached += event == _CACHE_HIT_EVENT

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_for_hits)


def choose_devices(options: ModelOptions, mesh: Mesh | None, *, across_hosts: bool) -> ModelMesh:
    """The devices that the options or the mesh name; by default JAX's default device. Starts JAX's backend.

    With `across_hosts`, as many devices of each of JAX's processes; by default all.

    Raises:
        ConfigError: there are fewer devices, or the mesh cuts arrays along several axes.
    """
    if across_hosts:
        return _of_hosts(options, mesh)
    if mesh is not None:
        return _of_mesh(options, mesh)
    size, ids = options.tensor_parallel_size, options.device_ids
    if ids is None and size in (None, 1):
        return ModelMesh.default()
    devices = jax.local_devices()
    if (more := max(ids) + 1 if ids else size or 1) > len(devices):
        raise ConfigError(
            "JAX has no device of this number" if ids else "JAX has fewer devices",
            got=f"{', '.join(map(str, ids)) if ids else f'tensor_parallel_size={size}'}; JAX has {len(devices)}, of platform "
            f"{devices[0].platform}",
            fix=_more_devices(more) if devices[0].platform == "cpu" else f"use at most {len(devices)}, counted from 0",
        )
    return ModelMesh(tuple(devices[index] for index in ids or range(more)))


def on_devices(model: ServedModel, mesh: ModelMesh) -> ServedModel:
    """The model as these devices serve it. Raises `ConfigError` if they cannot."""
    if isinstance(model, Model):
        return model.on_devices(mesh.size)
    if mesh.size == 1:
        return model
    if not isinstance(model, CutModel):
        raise ConfigError(
            "a model of one's own says how several devices cut its weights",
            got=f"{type(model).__name__} without partition_specs()",
            fix="add the method, see models/protocol.py and examples/own_model.py",
        )
    for what, size in (("query heads", model.config.num_heads), ("KV heads", model.config.num_kv_heads)):
        if size % mesh.size:
            raise ConfigError(
                f"the {what} do not divide evenly among the devices",
                got=f"{size} on {mesh.size} devices",
                fix="use a divisor, or repeat the KV heads in the model",
            )
    return model


def _of_hosts(options: ModelOptions, mesh: Mesh | None) -> ModelMesh:
    # Host by host, so that all hosts choose the same.
    if mesh is not None:
        raise ConfigError("a mesh cannot be given with several hosts", got="a mesh", fix="leave it out")
    by_host: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_host.setdefault(device.process_index, []).append(device)
    num_hosts, fewest = len(by_host), min(map(len, by_host.values()))
    size, ids = options.tensor_parallel_size, options.device_ids
    if ids is None:
        ids = range(fewest if size is None else size // num_hosts)
    if size not in (None, num_hosts * len(ids)) or not ids or max(ids) >= fewest:
        raise ConfigError(
            "every host must give the same number of devices",
            got=f"tensor_parallel_size={size}, devices={options.devices}; {num_hosts} hosts have "
            f"{', '.join(str(len(devices)) for devices in by_host.values())}",
            fix=f"leave both out, or tensor_parallel_size of a multiple of {num_hosts}, up to {num_hosts * fewest}",
        )
    return ModelMesh(tuple(devices[index] for devices in by_host.values() for index in ids))


def _of_mesh(options: ModelOptions, mesh: Mesh) -> ModelMesh:
    if not isinstance(mesh, Mesh):
        raise ConfigError("mesh must be a jax.sharding.Mesh", got=shown(mesh), fix="jax.make_mesh((2,), ('tp',))")
    if options.tensor_parallel_size not in (None, mesh.size) or options.devices is not None:
        raise ConfigError(
            "mesh cannot be combined with devices or tensor_parallel_size",
            got=f"mesh of {mesh.size}, tensor_parallel_size={options.tensor_parallel_size}, devices={options.devices}",
            fix="give the mesh alone",
        )
    if sum(size > 1 for size in mesh.shape.values()) > 1:
        raise ConfigError(
            "only one axis of mesh may be longer than one",
            got=dict(mesh.shape),
            fix="give a part of it with one axis, such as Mesh(mesh.devices[0], mesh.axis_names[1:])",
        )
    return ModelMesh(tuple(mesh.devices.flat))


def _more_devices(count: int) -> str:
    return (
        f"on a CPU, before JAX starts: XLA_FLAGS=--xla_force_host_platform_device_count={count}, or "
        f"jax.config.update('jax_num_cpu_devices', {count})"
    )
