"""How an engine starts: what JAX is told before its backend runs, what is loaded, what is compiled, and how long it took."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.config import ModelConfig
from jinfercept.models.embedded import cache_directory
from jinfercept.models.in_memory_weights import initial_params
from jinfercept.models.load import Loaded, dtype_name, load, read_config
from jinfercept.models.model import kv_bytes_per_token, param_bytes
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.runner.runner import ModelRunner, RunnerShape, step_bytes
from jinfercept.sched.profile import Profile
from jinfercept.startup.layer_groups import GroupChoice, Tried, remembered_layers, try_groups
from jinfercept.startup.memory import FreeMemory, MemoryPlan, check_weights, plan_memory
from jinfercept.startup.profiler import EFFORTS, measure, profile_path, remember, remembered

GPU_LAYERS_PER_STEP = 4
"""Layers per executable on a GPU unless the user says otherwise: a few executables a step, and short to compile."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds that the parts of a start took, and what they were for.

    Attributes:
        num_executables: compiled, of which `num_cached` were found on disk.
        profile: where the costs of steps come from.
        grouping: layers per executable, and where the number comes from.
    """

    load_s: float
    compile_s: float
    num_executables: int
    num_cached: int
    profile_s: float
    profile: str
    grouping: str

    def __str__(self) -> str:
        return (
            f"start: loaded in {self.load_s:.1f} s; {self.num_executables} executables in {self.compile_s:.1f} s, "
            f"{self.num_cached} of them from the cache, {self.grouping}; profile {self.profile} in {self.profile_s:.1f} s"
        )


class Grouping(NamedTuple):
    """Layers per executable, where the number comes from, and what was tried to find it."""

    layers_per_step: int
    source: str
    tried: Sequence[Tried] = ()

    def __str__(self) -> str:
        return f"layers by {self.layers_per_step}, {self.source}"


def prepare_backend(config: EngineConfig) -> None:
    """What has to be set before the backend starts, unless the user has set it: that a GPU's memory is taken as it is needed
    and how much of it, room for host copies, and the compilation cache."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # jaxlib refuses to see both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(config.cache.gpu_memory_utilization))
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(math.ceil(config.cache.swap_space) + 4))
    if config.runner.compilation_cache and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def check_attention(attention: str) -> None:
    """Raises `ConfigError` if this implementation has nothing for JAX's default backend, which this starts."""
    if attention in ("triton", "mosaic") and jax.default_backend() != "gpu":
        raise ConfigError(
            f"attention={attention} is a GPU's", got=f"JAX on a {jax.default_backend()}", fix="attention=auto, or cpu"
        )


def load_model(
    model: str | Path | ModelConfig | ServedModel, params: Params | None, config: EngineConfig
) -> Loaded[ServedModel]:
    """The model with its weights. Raises `ModelError` or `ConfigError`, the latter if the weights do not fit."""
    if isinstance(model, ServedModel):
        if params is None:
            raise ModelError("a Model needs its weights", got="no params", fix="pass params=...")
        return Loaded(model, initial_params(model, params), None, "dummy")
    if params is not None:
        raise ModelError(
            "params go with a Model", got=type(model).__name__, fix="pass Model(config), or leave params out"
        )
    options = config.model
    model_config = model if isinstance(model, ModelConfig) else read_config(model)
    check_weights(param_bytes(model_config, dtype_name(options.dtype)), FreeMemory.on(jax.local_devices()[0]))
    return load(model, dtype=options.dtype, load_format=options.load_format, seed=options.seed)  # pyright: ignore[reportArgumentType]


def group_layers(
    model: ServedModel,
    params: Params,
    config: EngineConfig,
    effort: str | None,
    progress: Callable[[str, int, int], None],
) -> Grouping:
    """How many layers an executable has, and how it is known.

    As the user says, else measured now if the effort that is named includes it, else as measured last for a start like this
    one, else the platform's default. Raises `ConfigError` if the pools cannot work.
    """
    num_layers, asked = model.config.num_layers, config.runner.layers_per_step
    if asked is not None:
        return Grouping(min(asked, num_layers), "as given")
    default = min(num_layers, 1 if _device(params).platform == "cpu" else GPU_LAYERS_PER_STEP)
    settings = profile_settings(model, params, _runner_shape(1, 1, config, default), config)
    settings = {name: value for name, value in settings.items() if name != "layers_per_step"}
    path = profile_path(cache_directory(), settings).with_suffix(".layers.json")
    if effort is None or not EFFORTS[effort].groups:
        known = remembered_layers(path, num_layers)
        return Grouping(default, "the default") if known is None else Grouping(known, "remembered")
    _, shape = plan_pools(model, params, config, default)
    tried = try_groups(model, params, shape, config.runner.attention, progress)
    chosen = next(row.layers_per_step for row in tried if row.chosen)
    with suppress(OSError):
        remember(GroupChoice(chosen, settings), path)
    return Grouping(chosen, "measured", tried)


def plan_pools(
    model: ServedModel, params: Params, config: EngineConfig, layers_per_step: int
) -> tuple[MemoryPlan, RunnerShape]:
    """Sizes of the pools, and of what is compiled. Raises `ConfigError` if they cannot work.

    A device with memory of its own has its steps compiled first, for a pool of one page, to learn what they take beside it.
    """
    room = FreeMemory.on(_device(params))
    beside = 0
    if not room.shared:
        longest = config.model.max_model_len or model.config.max_position
        beside = step_bytes(model, params, _runner_shape(1, longest, config, layers_per_step), config.runner.attention)
    memory = plan_memory(model.config, params, config, room, beside)
    num_pages = memory.kv_tokens // config.cache.page_size
    return memory, _runner_shape(num_pages, memory.max_model_len, config, layers_per_step)


def profile_settings(
    model: ServedModel, params: Params, shape: RunnerShape, config: EngineConfig
) -> Mapping[str, str | int]:
    """Everything that the cost of a step depends on."""
    return {
        "model": repr(model.config),
        "dtype": str(jax.tree.leaves(params)[0].dtype),
        "buckets": repr(shape.buckets),
        "max_num_seqs": shape.max_num_seqs,
        "page_size": shape.page_size,
        "layers_per_step": shape.layers_per_step,
        "transfer_parts": shape.transfer_parts,
        "attention": config.runner.attention,
        "device": _device(params).device_kind,
        "processors": os.cpu_count() or 0,
        "jax": jax.__version__,
    }


def profile_of(
    model: ServedModel,
    runner: ModelRunner,
    shape: RunnerShape,
    config: EngineConfig,
    effort: str | None,
    tried: Sequence[Tried],
    progress: Callable[[str, int, int], None],
) -> tuple[Profile, str]:
    """What steps and transfers cost here, and how it is known: measured now if an effort is named, else as it was last.

    Numbers of layers per executable that were `tried` go into its tables.
    """
    settings = profile_settings(model, runner.params, shape, config)
    path = profile_path(cache_directory(), settings)
    known = remembered(path) if effort is None else None
    if known is not None:
        return known, "remembered"
    profile = measure(
        runner,
        shape,
        name=f"{model.config.family} of {model.config.num_layers} layers on {settings['device']}",
        kv_bytes_per_token=kv_bytes_per_token(model.config, str(settings["dtype"])),
        effort=EFFORTS[effort or "quick"],
        settings=settings,
        progress=progress,
    )
    profile = replace(profile, tables={**profile.tables, "groups": [row._asdict() for row in tried]})
    with suppress(OSError):  # a cache that cannot be written costs the next start a moment
        remember(profile, path)
    return profile, "measured"


def _runner_shape(num_pages: int, max_model_len: int, config: EngineConfig, layers_per_step: int) -> RunnerShape:
    most = config.scheduler.max_num_batched_tokens
    sizes = [size for size in (1, 8, 32, 128, 512, 2048, 8192) if size < most]
    return RunnerShape(
        num_pages=num_pages,
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        buckets=(*sizes, most),
        layers_per_step=layers_per_step,
        transfer_parts=config.runner.transfer_parts,
    )


def _device(params: Params):
    return next(iter(jax.tree.leaves(params.embed)[0].devices()))
