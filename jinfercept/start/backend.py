"""JAX before its backend starts: environment variables and the compilation cache; and which attention the backend can run."""

import logging
import math
import os

import jax

from jinfercept.config import EngineConfig
from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.machine import memory, num_processors
from jinfercept.errors import ConfigError, describe_failure
from jinfercept.models.embedded import cache_directory
from jinfercept.models.jax_settings import check_settings
from jinfercept.models.mesh import ModelMesh
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.layouts.interleaved import INTERLEAVED_ON
from jinfercept.start.compile_cache import check_bucket, drop_damaged
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

    Raises:
        ConfigError: the user's compilation cache is in a bucket, for which a package is missing.
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
    elif jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache:
        check_bucket(jax.config.jax_compilation_cache_dir)


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
