"""The start of an engine: the model is loaded, executables are compiled, costs are known. Runs no request.

Benchmarks that need the runner itself make an `EngineSetup` without an `LLM`; `LLM(setup)` serves on one.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jinfercept.config import ALIASES, OPTIONS, EngineConfig, RestartOptions
from jinfercept.disk.store import DiskStore
from jinfercept.engine.process_end import ending_at_exit
from jinfercept.errors import ConfigError, ModelError, shown
from jinfercept.hosts.group import HostGroup
from jinfercept.hosts.leading import LeadingRunner
from jinfercept.models.config import ModelConfig
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.load import Loaded, bytes_to_load, dtype_name, load, locate, read_config
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model
from jinfercept.models.protocol import ModelDimensions, Params, ServedModel
from jinfercept.runner.executables import Progress, silent
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.estimators import EstimatorChoice
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.orders import OrderChoice
from jinfercept.sched.policies import PolicyChoice
from jinfercept.sched.profile import Profile
from jinfercept.startup.assembly import Assembled, Machine, OwnParts, Recorder, assemble, chunks
from jinfercept.startup.backend import prepare_backend, start_backend
from jinfercept.startup.chosen_tokenizer import TokenizerChoice, as_tokenizer
from jinfercept.startup.compile_counter import CompileCounter
from jinfercept.startup.devices import choose_devices, on_devices
from jinfercept.startup.disk_tier import DiskTier, identity_of, open_store, priced
from jinfercept.startup.draft_model import add_drafter, load_draft_model
from jinfercept.startup.generation_config import sampling_defaults
from jinfercept.startup.invariant import as_invariant
from jinfercept.startup.memory import FreeMemory, MemoryPlan, check_weights, fit_host, most_at_once
from jinfercept.startup.own_model import check_config, check_functions, to_serve
from jinfercept.startup.profiler import EFFORTS
from jinfercept.startup.recurrent import as_served
from jinfercept.startup.served_adapters import add_adapters, with_tool_adapter
from jinfercept.startup.several_hosts import follow_to_the_end, join_hosts, model_facts, placement_of
from jinfercept.startup.sizing import group_layers, measured_profile, plan_pools, remembered_profile
from jinfercept.tokenizer.load import load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer
from jinfercept.values.vllm_names import own_options
from jinfercept.weights.in_memory import initial_params

log = logging.getLogger("jinfercept")

CHANGEABLE = frozenset({"policy", "estimator", "order", *RestartOptions.__annotations__})
"""Options that no executable depends on."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of the parts of a start.

    Attributes:
        load_s: for the weights, `tokenizer_s` for the tokenizer, `pages_s` for the pools, `compile_s` for the executables.
        num_executables: executables that were compiled, of which `num_cached` were found on disk.
        num_pending: executables that a lazy start left to be compiled behind the first requests.
        grouping: layers per executable, and where the number comes from.
    """

    load_s: float
    tokenizer_s: float
    pages_s: float
    compile_s: float
    num_executables: int
    num_cached: int
    num_pending: int
    profile_s: float
    profile: str
    grouping: str

    def __str__(self) -> str:
        loaded_s = self.load_s + self.tokenizer_s + self.pages_s
        pending_note = f", {self.num_pending} more behind the first requests" if self.num_pending else ""
        return (
            f"start: loaded in {loaded_s:.1f} s; {self.num_executables} executables in {self.compile_s:.1f} s, "
            f"{self.num_cached} of them from the cache{pending_note}, {self.grouping}; "
            f"profile {self.profile} in {self.profile_s:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A model that is loaded and compiled, and the options of the engines that run on it, one at a time.

    Attributes:
        machine: its runner, sizes, tokenizer and costs.
        flags: the options as they were given, by name.
        config: the same, with defaults, in sections.
        own: a policy, an estimator and an order instead of those that the options name.
        memory_plan: sizes of the pools.
        times: seconds that the start took.
        sampling_defaults: fields of `SamplingParams` whose defaults come from the checkpoint's `generation_config.json`.
        name: of the model, as it was given, or of its family.
    """

    model: ServedModel
    machine: Machine
    flags: Mapping[str, Any]
    config: EngineConfig
    own: OwnParts
    memory_plan: MemoryPlan
    times: StartTimes
    sampling_defaults: Mapping[str, Any]
    name: str

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        return dtype_name(self.config.model.dtype)

    def changed(
        self,
        policy: PolicyChoice | None = None,
        estimator: EstimatorChoice | None = None,
        order: OrderChoice | None = None,
        **flags: Any,
    ) -> Self:
        """The same with other options, of those that are `CHANGEABLE`; policy, estimator and order stay where they are None.

        Raises:
            ConfigError: an option is fixed once executables are compiled, unknown or out of range.
        """
        own = OwnParts.take(flags, policy=policy, estimator=estimator, order=order).following(self.own, flags)
        merged = {**self.flags, **flags}
        config = as_served(EngineConfig.from_options(merged), self.model)
        config = as_invariant(config, self.model, self.machine.runner.params)
        fixed = sorted(set(flags) - CHANGEABLE)
        if fixed:
            raise ConfigError(
                "restart cannot change this option", got=", ".join(fixed), fix=f"change {sorted(CHANGEABLE)}"
            )
        drafter, loaded = config.scheduling.speculation.model, self.machine.draft_model
        if drafter not in (None, loaded):
            raise ConfigError(
                "restart cannot load another draft model", got=drafter, fix=f"{loaded or 'ngram'}, or a new LLM"
            )
        drafts, most = config.scheduling.speculation.num_speculative_tokens, self.machine.shape.num_drafts
        if drafts > most:
            raise ConfigError(
                "this LLM was compiled for fewer draft tokens", got=drafts, fix=f"at most {most}, or a new LLM"
            )
        own.check(config)
        chunks(config, self.machine.shape, own)
        memory_plan = self.memory_plan.with_host(config.cache)
        return replace(self, flags=merged, config=config, own=own, memory_plan=memory_plan)

    def assemble(self, record: Recorder | None = None) -> Assembled:
        """A new engine with empty pages. Raises `ConfigError` if `record` returns something else than it should."""
        return assemble(self.machine, self.config, self.memory_plan, self.own, record)

    def close(self) -> None:
        """Free the weights and the pages. For setups that no `LLM` serves on."""
        self.machine.close()


def set_up(
    model: str | Path | ModelConfig | ServedModel,
    *,
    params: Params | None = None,
    tokenizer: TokenizerChoice | None = None,
    policy: PolicyChoice | None = None,
    estimator: EstimatorChoice | None = None,
    order: OrderChoice | None = None,
    profile: Profile | str | Path | None = None,
    mesh: Mesh | None = None,
    lazy: bool = False,
    progress: Progress = silent,
    **flags: Any,
) -> EngineSetup:
    """Load a model, compile what will serve it and find out what its steps cost. Logs the memory plan and the times at INFO.

    Args, and what is raised: as `LLM`; but by default everything is compiled, and nothing shown.
    """
    own = OwnParts.take(flags, policy=policy, estimator=estimator, order=order)
    if isinstance(profile, str | Path):
        profile, flags["profile"] = None, str(profile)
    elif profile is not None and not isinstance(profile, Profile):
        raise ConfigError("profile must be a Profile, a name or a file", got=shown(profile), fix="Profile(…)")
    flags, notes = own_options(flags, OPTIONS, ALIASES)
    for note in notes:
        log.info("%s", note)
    flags = with_tool_adapter(model, flags) if params is None else flags
    config = EngineConfig.from_options(flags)
    if config.adapters.choice.call_bias and config.adapters.tool_lora is None:
        raise ConfigError("tool_call_bias needs tool_lora", got="no tool_lora", fix="give tool_lora too")
    own.check(config)
    effort = None
    if profile is None and (named := config.scheduling.profile) is not None:
        effort, profile = (named, None) if named in EFFORTS else (None, load_profile(named))
    prepare_backend(config, swap_is_given="swap_space" in flags)
    read = None if tokenizer is None else as_tokenizer(tokenizer)
    if not isinstance(model, str | Path | ModelConfig | ServedModel):
        raise ModelError(
            "model must be a name, a path, a ModelConfig or a Model", got=shown(model), fix=to_serve(model)
        )
    group = None
    if (placement := placement_of(config)) is not None:
        group = join_hosts(placement, config, model_facts(model, _source(model), repr(_dimensions(model))))
    with ending_at_exit(), nullcontext() if group is None else group.failing():
        start_backend(config.advanced.attention)
        devices = choose_devices(config.model, mesh, across_hosts=group is not None)
        store = open_store(config.cache)
        try:
            with own_settings(devices.local_devices[0]):
                return _set_up_here(
                    model, params, read, own, profile, effort, config, flags, group, devices, lazy, progress, store
                )
        except BaseException:
            if store is not None:
                store.close()
            raise


def _set_up_here(
    model: str | Path | ModelConfig | ServedModel,
    params: Params | None,
    tokenizer: Tokenizer | None,
    own: OwnParts,
    profile: Profile | None,
    effort: str | None,
    config: EngineConfig,
    flags: Mapping[str, Any],
    group: HostGroup | None,
    devices: ModelMesh,
    lazy: bool,
    progress: Progress,
    store: DiskStore | None,
) -> EngineSetup:
    """Load, compile and measure, on one host of several or on the only one. Arguments as `set_up`'s, checked.

    Raises `SystemExit` at the end of every host but host 0.
    """
    lazy = lazy and group is None and effort is None  # all hosts alike; nothing is compiled among exact measurements
    began_s = time.monotonic()
    defaults = sampling_defaults(config.model.generation_config, _source(model))
    progress("loading", 0, 1)
    if defaults:
        log.info("sampling defaults from generation_config.json, which generation_config=vllm ignores: %s", defaults)
    loaded = load_model(model, params, config, devices).for_length(config.model.max_model_len)
    loaded, adapters = add_adapters(loaded, config)
    jax.block_until_ready(loaded.params)  # a draft model has the memory that is left
    weights_s = time.monotonic()
    tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
    draft = load_draft_model(config, devices, tokenizer, across_hosts=group is not None)
    config = as_served(config, loaded.model, None if draft is None else draft.model)
    config = as_invariant(config, loaded.model, loaded.params)
    progress("loading", 1, 1)
    loaded_s = time.monotonic()
    grouping = group_layers(loaded.model, loaded.params, config, effort if group is None else None, progress, draft)
    if group is not None:
        grouping = grouping._replace(**group.least({"layers_per_step": grouping.layers_per_step}))
    grouped_s = time.monotonic()
    with closing(CompileCounter()) as compilations:
        memory_plan, shape = plan_pools(loaded.model, loaded.params, config, grouping.layers_per_step, draft)
        cache = fit_host(memory_plan, config.cache, is_given="swap_space" in flags)
        if group is not None:
            memory_plan, shape = _alike(memory_plan, shape, group)
            cache = replace(
                cache, swap_space=group.least({"swap_mib": int(1024 * cache.swap_space)})["swap_mib"] / 1024
            )
        config, flags = replace(config, cache=cache), {**flags, "swap_space": cache.swap_space}
        memory_plan = memory_plan.with_host(cache)
        log.info("%s", memory_plan)
        chunks(config, shape, own)
        runner, drafter = ModelRunner(loaded.model, loaded.params, shape, attention=config.advanced.attention), None
        runner.owns_params = params is None
        if draft is not None:
            drafter = add_drafter(runner, loaded.model, draft, shape, config.advanced.attention)
        pages_s = time.monotonic()
        how = "given"
        if profile is None and effort is None:
            profile, how = remembered_profile(loaded.model, loaded.params, shape, config, draft), "remembered"
        first = None
        if lazy and (profile is not None or draft is None):
            kind = "filtered" if defaults.keys() & {"top_k", "top_p", "min_p"} else "drawn"
            first = runner.first_executables(measured=profile is None, tuned=memory_plan.timed_bytes > 0, kind=kind)
        with memory_plan.placed():
            runner.warm_up(progress, most_at_once(memory_plan, FreeMemory.on(*devices.local_devices)), first)
    warm_s = time.monotonic()
    leader = None
    if group is not None:
        group.least({})  # waits until all hosts can serve
        if group.host_id:
            follow_to_the_end(runner, group)
        leader = LeadingRunner(runner, group)
    if profile is None:
        how, runs, measured = "measured", (leader or runner, drafter), (effort or "quick", grouping.tried, progress)
        profile = measured_profile(loaded.model, loaded.params, draft, *runs, shape, config, *measured)
    times = StartTimes(
        load_s=weights_s - began_s,
        tokenizer_s=loaded_s - weights_s,
        pages_s=pages_s - grouped_s,
        compile_s=warm_s - pages_s,
        num_executables=compilations.count,
        num_cached=compilations.cached,
        num_pending=runner.executables.num_pending,
        profile_s=grouped_s - loaded_s + time.monotonic() - warm_s,
        profile=how,
        grouping=str(grouping),
    )
    log.info("%s", times)
    disk = None
    if store is not None:
        disk = DiskTier(store, identity_of(loaded.model.config, runner.params, config))
        profile = priced(profile, store, memory_plan.token_bytes(shape.page_size))
    machine = Machine(
        loaded.model.config,
        tokenizer,
        runner,
        shape,
        profile,
        config.scheduling.speculation.model,
        leader,
        disk,
        adapters,
    )
    name = str(model) if isinstance(model, str | Path) else loaded.model.config.family
    return EngineSetup(loaded.model, machine, flags, config, own, memory_plan, times, defaults, name)


def _alike(memory_plan: MemoryPlan, shape: RunnerShape, group: HostGroup) -> tuple[MemoryPlan, RunnerShape]:
    """The sizes that every host of a group has room for."""
    sizes = {"kv_tokens": memory_plan.kv_tokens, "max_model_len": memory_plan.max_model_len}
    states = memory_plan.states._replace(**group.least({"num_states": shape.num_states}))
    memory_plan = replace(memory_plan.limited(shape.page_size, **group.least(sizes)), states=states)
    windows = memory_plan.windows._replace(**group.least({"num_device_pages": shape.num_window_pages}))
    memory_plan = replace(memory_plan, windows=windows)
    num_pages, longest = memory_plan.kv_tokens // shape.page_size, memory_plan.max_model_len
    shape = replace(shape, num_pages=num_pages, max_model_len=longest, num_states=states.num_states)
    return memory_plan, replace(shape, num_window_pages=windows.num_device_pages)


def load_model(
    model: str | Path | ModelConfig | ServedModel, params: Params | None, config: EngineConfig, mesh: ModelMesh
) -> Loaded[ServedModel]:
    """The model with its weights on its devices. Raises `ModelError`, or `ConfigError` if the weights do not fit there."""
    options = config.model
    if options.activation_dtype != "auto" and (isinstance(model, ServedModel) or params is not None):
        fix = "activation_dtype=auto, or the name of a quantised checkpoint"
        raise ModelError("activation_dtype int8 needs a checkpoint that is loaded", got="weights in memory", fix=fix)
    if isinstance(model, ServedModel):
        if params is None:
            raise ModelError("a Model needs its weights", got="no params", fix="pass params=...")
        is_own = not isinstance(model, Model)
        if is_own:
            check_config(model)
        served = on_devices(model, mesh)
        params = initial_params(served, params, mesh)
        if is_own:
            check_functions(served, params)
        return Loaded(served, params, None, "dummy")
    if params is not None:
        raise ModelError("params need a Model", got=type(model).__name__, fix="pass Model(config), or leave params out")
    num_bytes = bytes_to_load(model, dtype_name(options.dtype), mesh.size, options.load_format, options.quantization)
    check_weights(num_bytes, FreeMemory.on(*mesh.local_devices))
    return load(
        model,
        dtype=options.dtype,
        load_format=options.load_format,
        seed=options.seed,
        mesh=mesh,
        quantization=options.quantization,
        activation_dtype=options.activation_dtype,
    )  # pyright: ignore[reportReturnType]


def _dimensions(model: str | Path | ModelConfig | ServedModel) -> ModelDimensions:
    """The dimensions of a model that is not loaded. Raises `ModelError`."""
    if isinstance(model, str | Path):
        return read_config(model)
    return model if isinstance(model, ModelConfig) else model.config


def _source(model: object) -> Path | None:
    """Where a checkpoint's files are. Raises `ModelError` if there is no such model."""
    return locate(model) if isinstance(model, str | Path) else None
