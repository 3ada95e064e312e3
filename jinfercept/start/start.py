"""The start of an engine: the model is loaded, executables are compiled, costs are known. Runs no request.

Benchmarks that need the runner itself make an `EngineSetup` without an `LLM`; `LLM(setup)` serves on one.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.config import ALIASES, OPTIONS, EngineConfig
from jinfercept.engine.thread import ending_at_exit
from jinfercept.errors import ConfigError, ModelError, shown
from jinfercept.kv.disk import DiskStore
from jinfercept.models.config import ModelConfig
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.load import locate, read_config
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.protocol import ModelDimensions, Params, ServedModel
from jinfercept.runner.draft_layer import as_assistant
from jinfercept.runner.executables import Progress, silent
from jinfercept.runner.hosts.group import HostGroup, LeadingRunner
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.profile import Profile
from jinfercept.start.assembly import EngineSetup, StartTimes, as_invariant, check_choices, chunks, without_objects
from jinfercept.start.backend import CompileCounter, choose_devices, prepare_backend, start_backend
from jinfercept.start.disk_tier import DiskTier, identity_of, open_store, priced
from jinfercept.start.loading import (
    TokenizerChoice,
    add_drafter,
    as_tokenizer,
    load_drafter,
    load_model,
    sampling_defaults,
)
from jinfercept.start.memory import FreeMemory, MemoryPlan, fit_host, most_at_once
from jinfercept.start.own_model import to_serve
from jinfercept.start.profiler import EFFORTS
from jinfercept.start.served_adapters import add_adapters, with_tool_adapter
from jinfercept.start.several_hosts import follow_to_the_end, join_hosts, model_facts, placement_of
from jinfercept.start.side_pools import check_recurrent
from jinfercept.start.sizing import measured_profile, plan_pools, remembered_profile
from jinfercept.vllm_names import own_options

log = logging.getLogger("jinfercept")


def set_up(
    model: str | Path | ModelConfig | ServedModel,
    *,
    params: Params | None = None,
    tokenizer: TokenizerChoice | None = None,
    profile: Profile | str | Path | None = None,
    mesh: Mesh | None = None,
    lazy: bool = False,
    progress: Progress = silent,
    **flags: Any,
) -> EngineSetup:
    """Load a model, compile what will serve it and find out what its steps cost. Logs the memory plan and the times at INFO.

    Arguments and errors are those of `LLM`; but by default everything is compiled, and nothing shown.
    """
    if isinstance(profile, str | Path):
        profile, flags["profile"] = None, str(profile)
    elif profile is not None and not isinstance(profile, Profile):
        raise ConfigError("profile must be a Profile, a name or a file", got=shown(profile), fix="Profile(…)")
    flags, notes = own_options(flags, OPTIONS, ALIASES)
    for note in notes:
        log.info("%s", note)
    flags = with_tool_adapter(model, flags) if params is None else flags
    config = EngineConfig.from_options(flags)
    if config.adapters.tool_call_bias and config.adapters.tool_lora is None:
        raise ConfigError("tool_call_bias needs tool_lora", got="no tool_lora", fix="give tool_lora too")
    check_choices(config)
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
        facts = model_facts(model, _source(model), repr(_dimensions(model)))
        if (drafter := config.scheduling.speculation.model) is not None:
            facts |= {f"drafting {name}": fact for name, fact in model_facts(drafter, locate(drafter), drafter).items()}
        group = join_hosts(placement, config, facts)
    with ending_at_exit(), nullcontext() if group is None else group.failing():
        start_backend(config.advanced.attention)
        devices = choose_devices(config.model, mesh, across_hosts=group is not None)
        store = open_store(config.cache)
        try:
            with own_settings(devices.local_devices[0]):
                start = _Start(config, without_objects(flags), devices, group, progress)
                start.load(model, params, read)
                # all hosts alike; nothing is compiled among exact measurements
                start.compile(profile, effort, lazy=lazy and group is None and effort is None)
                return start.served(store, str(model) if isinstance(model, str | Path) else None)
        except BaseException:
            if store is not None:
                store.close()
            raise


class _Start:
    """A start on the only host or on one of several. Its methods are called in the order in which they stand."""

    def __init__(
        self,
        config: EngineConfig,
        flags: Mapping[str, Any],
        devices: ModelMesh,
        group: HostGroup | None,
        progress: Progress,
    ) -> None:
        self._config, self._flags = config, flags
        self._devices, self._group, self._progress = devices, group, progress
        self._seconds = dict[str, float]()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - began_s

    def load(
        self,
        model: str | Path | ModelConfig | ServedModel,
        params: Params | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        config = self._config
        with self._timed("load_s"):
            self._defaults = sampling_defaults(config.model.generation_config, _source(model))
            self._progress("loading", 0, 1)
            if self._defaults:
                text = "sampling defaults from generation_config.json, which generation_config=vllm ignores: %s"
                log.info(text, self._defaults)
            loaded = load_model(model, params, config, self._devices).for_length(config.model.max_model_len)
            self._loaded, self._room = add_adapters(loaded, config)
            self._owns_params = params is None
            jax.block_until_ready(self._loaded.params)  # a draft model has the memory that is left
        loaded = self._loaded
        with self._timed("tokenizer_s"):
            self._tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
            across_hosts = self._group is not None
            own = loaded.model, self._devices, self._tokenizer
            self._draft = draft = load_drafter(config, *own, across_hosts=across_hosts)
            self._assistant = as_assistant(draft)
            check_recurrent(config, loaded.model, draft.model if draft and self._assistant is None else None)
            self._config = as_invariant(config, loaded.model, loaded.params)
        self._progress("loading", 1, 1)

    def compile(self, profile: Profile | None, effort: str | None, *, lazy: bool) -> None:
        # `effort` says how long costs are measured that `profile` does not have; None: they are looked up or measured quickly.
        loaded, group, draft, progress = self._loaded, self._group, self._draft, self._progress
        config, model, params = self._config, loaded.model, loaded.params
        with closing(CompileCounter()) as compilations:
            with self._timed("pages_s"):
                self._plan()
                config, shape = self._config, self._shape
                attention, drafter = config.advanced.attention, None
                runner = ModelRunner(model, params, shape, attention=attention, assistant=self._assistant)
                runner.owns_params = self._owns_params
                if draft is not None and self._assistant is None:
                    drafter = add_drafter(runner, model, draft, shape, attention)
            with self._timed("compile_s"):
                self._how = "given"
                if profile is None and effort is None:
                    profile, self._how = remembered_profile(model, params, shape, config, draft), "remembered"
                first = None
                if lazy and (profile is not None or draft is None):
                    kind = "filtered" if self._defaults.keys() & {"top_k", "top_p", "min_p"} else "drawn"
                    tuned = self._memory_plan.timed_bytes > 0
                    first = runner.first_executables(measured=profile is None, tuned=tuned, kind=kind)
                at_once = most_at_once(self._memory_plan, FreeMemory.on(*self._devices.local_devices))
                with self._memory_plan.placed():
                    runner.warm_up(progress, at_once, first)
        self._runner, self._leader = runner, None
        if group is not None:
            group.least({})  # waits until all hosts can serve
            if group.host_id:
                follow_to_the_end(runner, group)
            self._leader = LeadingRunner(runner, group)
        with self._timed("profile_s"):
            if profile is None:
                self._how, runs = "measured", (self._leader or runner, drafter)
                profile = measured_profile(model, params, draft, *runs, shape, config, effort or "quick", progress)
        self._profile, self._compilations = profile, compilations

    def _plan(self) -> None:
        loaded, group, flags = self._loaded, self._group, self._flags
        memory_plan, shape = plan_pools(loaded.model, loaded.params, self._config, self._draft)
        if self._tokenizer is not None and self._tokenizer.vocab_size < loaded.model.config.vocab_size:
            ends = [1 + token for token in loaded.model.config.eos_token_ids]
            shape = replace(shape, num_drawn=max(self._tokenizer.ids_below, *ends, 1))
        cache = fit_host(memory_plan, self._config.cache, is_given="swap_space" in flags)
        if group is not None:
            memory_plan, shape = _alike(memory_plan, shape, group)
            swap_mib = group.least({"swap_mib": int(1024 * cache.swap_space)})["swap_mib"]
            cache = replace(cache, swap_space=swap_mib / 1024)
        self._config, self._flags = replace(self._config, cache=cache), {**flags, "swap_space": cache.swap_space}
        self._memory_plan, self._shape = memory_plan.with_host(cache), shape
        log.info("%s", self._memory_plan)
        chunks(self._config, shape)

    def served(self, store: DiskStore | None, name: str | None) -> EngineSetup:
        model, config, shape, profile = self._loaded.model, self._config, self._shape, self._profile
        times = StartTimes(
            **self._seconds,
            num_executables=self._compilations.count,
            num_cached=self._compilations.cached,
            num_pending=self._runner.executables.num_pending,
            profile=self._how,
        )
        log.info("%s", times)
        disk = None
        if store is not None:
            disk = DiskTier(store, identity_of(model.config, self._runner.params, config))
            profile = priced(profile, store, self._memory_plan.token_bytes(shape.page_size))
        return EngineSetup(
            model,
            self._tokenizer,
            self._runner,
            shape,
            profile,
            self._leader,
            config.scheduling.speculation.model,
            disk,
            self._room,
            self._flags,
            config,
            self._memory_plan,
            times,
            self._defaults,
            name or model.config.family,
        )


def _alike(memory_plan: MemoryPlan, shape: RunnerShape, group: HostGroup) -> tuple[MemoryPlan, RunnerShape]:
    sizes = {"kv_tokens": memory_plan.kv_tokens, "max_model_len": memory_plan.max_model_len}
    states = memory_plan.states._replace(**group.least({"num_states": shape.num_states}))
    memory_plan = replace(memory_plan.limited(shape.page_size, **group.least(sizes)), states=states)
    windows = memory_plan.windows._replace(**group.least({"num_slots": shape.num_window_pages}))
    memory_plan = replace(memory_plan, windows=windows)
    num_pages, longest = memory_plan.kv_tokens // shape.page_size, memory_plan.max_model_len
    shape = replace(shape, num_pages=num_pages, max_model_len=longest, num_states=states.num_states)
    return memory_plan, replace(shape, num_window_pages=windows.num_slots)


def _dimensions(model: str | Path | ModelConfig | ServedModel) -> ModelDimensions:
    if isinstance(model, str | Path):
        return read_config(model)
    return model if isinstance(model, ModelConfig) else model.config


def _source(model: object) -> Path | None:
    return locate(model) if isinstance(model, str | Path) else None
