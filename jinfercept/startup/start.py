"""The start of an engine: the model is loaded, executables are compiled, costs are known. Runs no request.

Benchmarks that need the runner itself make an `EngineSetup` without an `LLM`; `LLM(setup)` serves on one.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax

from jinfercept.config import EngineConfig, RestartOptions
from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.config import ModelConfig
from jinfercept.models.in_memory_weights import initial_params
from jinfercept.models.load import Loaded, dtype_name, load, locate, read_config
from jinfercept.models.model import param_bytes
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.runner.executables import Progress, silent
from jinfercept.runner.runner import ModelRunner
from jinfercept.sched.policies import check_name, check_policy
from jinfercept.sched.policy import Policy
from jinfercept.sched.profile import Profile, load_profile
from jinfercept.startup.assembly import Assembled, Machine, Recorder, assemble, chunks
from jinfercept.startup.backend import check_attention, prepare_backend
from jinfercept.startup.compile_counter import CompileCounter
from jinfercept.startup.generation_config import sampling_defaults
from jinfercept.startup.memory import FreeMemory, MemoryPlan, check_weights
from jinfercept.startup.profiler import EFFORTS
from jinfercept.startup.sizing import group_layers, plan_pools, profile_of
from jinfercept.tokenizer.load import load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("jinfercept")

CHANGEABLE = frozenset({"policy", *RestartOptions.__annotations__})
"""Options that no executable depends on."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of the parts of a start.

    Attributes:
        num_executables: executables that were compiled, of which `num_cached` were found on disk.
        profile: where the profile comes from.
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


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A model that is loaded and compiled, and the options of the engines that run on it, one at a time.

    Attributes:
        model: the model.
        machine: its runner, sizes, tokenizer and costs.
        flags: the options as they were given, by name.
        config: the same, with defaults, in sections.
        policy: a policy object instead of the one that the options name.
        memory_plan: sizes of the pools.
        times: seconds that the start took.
        sampling_defaults: fields of `SamplingParams` whose defaults come from the checkpoint's `generation_config.json`.
    """

    model: ServedModel
    machine: Machine
    flags: Mapping[str, Any]
    config: EngineConfig
    policy: Policy | None
    memory_plan: MemoryPlan
    times: StartTimes
    sampling_defaults: Mapping[str, Any]

    def changed(self, policy: Policy | str | None = None, **flags: Any) -> Self:
        """The same with other options, of those that are `CHANGEABLE`; the policy by name where `policy` is None.

        Raises:
            ConfigError: an option is fixed once executables are compiled, unknown or out of range.
        """
        if isinstance(policy, str):
            policy, flags["policy"] = None, policy
        merged = {**self.flags, **flags}
        config = EngineConfig.from_options(merged)
        fixed = sorted(set(flags) - CHANGEABLE)
        if fixed:
            raise ConfigError(
                "only a new LLM can change this", got=", ".join(fixed), fix=f"change {sorted(CHANGEABLE)}"
            )
        check_name(config.scheduling.policy)
        check_policy(policy)
        chunks(config, self.machine.shape, policy)
        memory_plan = self.memory_plan.with_host(config.cache)
        return replace(self, flags=merged, config=config, policy=policy, memory_plan=memory_plan)

    def assemble(self, record: Recorder | None = None) -> Assembled:
        """A new engine with empty pages. Raises `ConfigError` if `record` returns something else than it should."""
        return assemble(self.machine, self.config, self.memory_plan, self.policy, record)

    def close(self) -> None:
        """Free the weights and the pages. For setups that no `LLM` serves on."""
        self.machine.runner.close()


def set_up(
    model: str | Path | ModelConfig | ServedModel,
    *,
    params: Params | None = None,
    tokenizer: Tokenizer | None = None,
    policy: Policy | str | None = None,
    profile: Profile | str | Path | None = None,
    progress: Progress = silent,
    **flags: Any,
) -> EngineSetup:
    """Load a model, compile what will serve it and find out what its steps cost. Logs the memory plan and the times at INFO.

    Args, and what is raised: as `LLM`.
    """
    if isinstance(policy, str):
        policy, flags["policy"] = None, policy
    if isinstance(profile, str | Path):
        profile, flags["profile"] = None, str(profile)
    elif profile is not None and not isinstance(profile, Profile):
        raise ConfigError("a profile is a Profile, a name or a file", got=repr(profile)[:80], fix="Profile(…)")
    config = EngineConfig.from_options(flags)
    check_name(config.scheduling.policy)
    check_policy(policy)
    effort = None
    if profile is None and (asked := config.scheduling.profile) is not None:
        effort, profile = (asked, None) if asked in EFFORTS else (None, load_profile(asked))
    prepare_backend(config)
    check_attention(config.advanced.attention)
    if not isinstance(model, str | Path | ModelConfig | ServedModel):
        raise ModelError(
            "a model is a name, a path, a ModelConfig or a Model", got=repr(model)[:80], fix="give one of them"
        )
    progress("loading", 0, 1)
    began_s = time.monotonic()
    defaults = sampling_defaults(config.model.generation_config, _source(model))
    if defaults:
        log.info("sampling defaults from generation_config.json, which generation_config=vllm ignores: %s", defaults)
    loaded = load_model(model, params, config)
    tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
    progress("loading", 1, 1)
    loaded_s = time.monotonic()
    grouping = group_layers(loaded.model, loaded.params, config, effort, progress)
    grouped_s = time.monotonic()
    with closing(CompileCounter()) as compilations:
        memory_plan, shape = plan_pools(loaded.model, loaded.params, config, grouping.layers_per_step)
        log.info("%s", memory_plan)
        chunks(config, shape, policy)
        runner = ModelRunner(loaded.model, loaded.params, shape, attention=config.advanced.attention)
        runner.warm_up(progress)
    warm_s = time.monotonic()
    if profile is not None:
        how = "given"
    else:
        profile, how = profile_of(loaded.model, runner, shape, config, effort, grouping.tried, progress)
    times = StartTimes(
        load_s=loaded_s - began_s,
        compile_s=warm_s - grouped_s,
        num_executables=compilations.count,
        num_cached=compilations.cached,
        profile_s=grouped_s - loaded_s + time.monotonic() - warm_s,
        profile=how,
        grouping=str(grouping),
    )
    log.info("%s", times)
    machine = Machine(loaded.model.config, tokenizer, runner, shape, profile)
    return EngineSetup(loaded.model, machine, flags, config, policy, memory_plan, times, defaults)


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


def _source(model: object) -> Path | None:
    """Where a checkpoint's files are. Raises `ModelError` if there is no such model."""
    return locate(model) if isinstance(model, str | Path) else None
