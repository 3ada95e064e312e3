"""The parts that engines run on, and an engine of them. Weights and executables outlive engines; every engine starts empty."""

import inspect
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax

from jinfercept.chat.text_stream import TextStream
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.config import CHOICES, EngineConfig, RestartOptions
from jinfercept.cpu_kernels.ordered_attention import fewest_rows
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.disk_contexts import DiskContexts
from jinfercept.engine.dispatcher import Dispatcher, RealClock
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import ConfigError, refuse_any
from jinfercept.kv.manager import KVManager
from jinfercept.models.config import ModelConfig
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.load import dtype_name
from jinfercept.models.protocol import ModelDimensions, Params, ServedModel, num_draft_layers, states_of
from jinfercept.models.quantized import is_quantized
from jinfercept.runner.disk_pages import DiskPages
from jinfercept.runner.hosts.group import LeadingRunner
from jinfercept.runner.pools import Pool
from jinfercept.runner.runner import ForwardTicket, ModelRunner, StepTicket
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.estimator import make_estimator
from jinfercept.sched.orders import check_order_choice
from jinfercept.sched.policies import check_choice
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import SchedulerBuild, SchedulerLimits, plan_scheduler
from jinfercept.sched.speculation import SpeculationLimits
from jinfercept.start.disk_tier import DiskTier
from jinfercept.start.memory import MemoryPlan
from jinfercept.start.served_adapters import ServedAdapters
from jinfercept.start.several_hosts import disconnect
from jinfercept.start.side_pools import check_recurrent

CHANGEABLE = frozenset({*CHOICES, *RestartOptions.__annotations__})
"""Options that no executable depends on."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of the parts of a start."""

    load_s: float  # of weights
    tokenizer_s: float
    pages_s: float  # of the pools
    compile_s: float
    num_executables: int
    num_cached: int  # of these, the ones that were found on disk
    num_pending: int  # left by a lazy start to be compiled behind the first requests
    profile_s: float
    profile: str

    def __str__(self) -> str:
        loaded_s = self.load_s + self.tokenizer_s + self.pages_s
        pending_note = f", {self.num_pending} more behind the first requests" if self.num_pending else ""
        return (
            f"start: loaded in {loaded_s:.1f} s; {self.num_executables} executables in {self.compile_s:.1f} s, "
            f"{self.num_cached} of them from the cache{pending_note}; "
            f"profile {self.profile} in {self.profile_s:.1f} s"
        )


class Serving(NamedTuple):
    """An engine that serves, with the thread that steps it, the dispatcher of its calls, and the inputs of its policy."""

    engine: Engine
    thread: EngineThread
    dispatcher: Dispatcher
    build: SchedulerBuild

    def stats(self) -> EngineStats:
        """Counts of the engine from now on. Call it between two steps."""
        scheduler, build, log = self.engine.scheduler, self.build, RequestLog(self.engine.requests.clock.now)
        self.engine.observe(log)
        inside = [sequence for sequence in scheduler.unfinished if not sequence.at_door]
        synchronous = build.policy.synchronous
        stats = EngineStats(log, scheduler.kv, build.inputs, synchronous=synchronous, unfinished=inside)
        stats.at_door = scheduler.door.sequences
        return stats

    def close(self) -> None:
        self.thread.close()
        self.dispatcher.close()


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A model that is loaded and compiled, and the options of the engines that run on it, one at a time."""

    model: ServedModel
    tokenizer: Tokenizer | None
    runner: ModelRunner
    shape: RunnerShape
    profile: Profile
    leader: LeadingRunner[ForwardTicket, StepTicket] | None  # of several hosts; None: there is one
    draft_model: str | None  # its name
    disk: DiskTier | None
    room: ServedAdapters | None  # None: the model has no room for adapters
    # As they were given, without policies, estimators and orders that are objects: these have the state of one engine.
    flags: Mapping[str, Any]
    config: EngineConfig  # the same, with defaults, in sections; and with such objects
    memory_plan: MemoryPlan
    times: StartTimes
    sampling_defaults: Mapping[str, Any]  # fields of `SamplingParams` from the checkpoint's `generation_config.json`
    name: str  # as it was given, or of the model's family

    @property
    def adapters(self) -> AdapterTable:
        """The adapters by name; an empty table if there is no room for any."""
        return AdapterTable() if self.room is None else self.room.table

    @property
    def executor(self) -> ModelRunner | LeadingRunner[ForwardTicket, StepTicket]:
        return self.leader or self.runner

    def settings(self) -> AbstractContextManager[None]:
        """A context with the settings of JAX under which the runner works in any thread, see `own_settings`."""
        return own_settings(self.runner.device)

    @property
    def dtype(self) -> str:
        return dtype_name(self.config.model.dtype)

    def changed(self, **flags: Any) -> Self:
        """The same with other options, of those that are `CHANGEABLE`; None is the value before.

        Raises:
            ConfigError: an option is fixed once executables are compiled, unknown or out of range.
        """
        flags = {name: value for name, value in flags.items() if name not in CHOICES or value is not None}
        kept = {**self.flags, **without_objects(flags)}
        config = EngineConfig.from_options({**kept, **flags})
        check_recurrent(config, self.model)
        config = as_invariant(config, self.model, self.runner.params)
        fixed = sorted(set(flags) - CHANGEABLE)
        if fixed:
            raise ConfigError(
                "restart cannot change this option", got=", ".join(fixed), fix=f"change {sorted(CHANGEABLE)}"
            )
        drafter, loaded = config.scheduling.speculation.model, self.draft_model
        by_layer = config.scheduling.speculation.method == "mtp"
        if drafter is not None and (drafter, by_layer) != (loaded, self.shape.is_assisted):
            raise ConfigError(
                "restart cannot load another draft model", got=drafter, fix=f"{loaded or 'ngram'}, or a new LLM"
            )
        if by_layer and drafter is None and not num_draft_layers(self.model.config):
            fix = "another method, or a new LLM"
            raise ConfigError("restart cannot load the layer that drafts (mtp)", got="a model without it", fix=fix)
        drafts, most = config.scheduling.speculation.num_speculative_tokens, self.shape.num_drafts
        if drafts > most:
            raise ConfigError(
                "this LLM was compiled for fewer draft tokens", got=drafts, fix=f"at most {most}, or a new LLM"
            )
        return replace(self, flags=kept, config=config, memory_plan=self.memory_plan.with_host(config.cache))

    def serve(self) -> Serving:
        """A new engine with empty pages, whose thread starts with the first request."""
        shape, tokenizer, config, memory_plan = self.shape, self.tokenizer, self.config, self.memory_plan
        model_config, page_size = self.model.config, shape.page_size
        options = config.scheduling
        limits = _limits(config, shape, self.profile.draft_share)
        profile = self.profile if self.disk is not None else self.profile.without_disk()
        estimator = make_estimator(options.estimator)
        build = plan_scheduler(profile, estimator, options.policy, limits, page_size, options.order)
        self.runner.drafting = options.speculation.method != "ngram"
        kv = KVManager(
            shape.num_pages,
            memory_plan.host_tokens // page_size,
            page_size,
            identity=f"{model_config} {config.model.dtype} {config.model.activation_dtype} {config.cache.kv_cache_dtype}",
            prefix_caching=config.cache.enable_prefix_caching,
            most_moved_pages=max(1, memory_plan.moved_tokens // page_size),
            sides=memory_plan.windows if shape.num_window_pages else memory_plan.state_sizes(page_size),
            turn_ends=turn_end_ids(model_config, tokenizer),
        )
        clock = RealClock()
        scheduler = build.build(kv)
        wake = threading.Event()
        dispatcher = Dispatcher(wake.set)
        disk = None
        if self.disk is not None and isinstance(self.runner.kv, Pool):
            store, identity = self.disk
            pages = DiskPages(store, self.runner.kv, self.runner.second, identity, page_size, self.settings, wake.set)
            disk = DiskContexts(scheduler, pages, self.profile, shape.buckets[-1])
        requests = RequestLifecycle(
            scheduler,
            dispatcher,
            clock,
            vocab_size=model_config.vocab_size,
            eos_token_ids=end_token_ids(model_config, tokenizer),
            open_text=partial(TextStream.of, tokenizer) if tokenizer else None,
            encode=partial(tokenizer.encode, plain=True) if tokenizer else None,
            seed=config.model.seed,
            returns_experts=shape.routed_experts > 0,
            adapters=self.adapters,
        )
        options = config.advanced
        engine = Engine(
            requests,
            self.executor,
            wake,
            depth=options.pipeline_depth,
            check=options.check_pages,
            disk=disk,
        )
        return Serving(engine, EngineThread(engine, self.settings), dispatcher, build)

    def close(self) -> None:
        """Free the weights and the pages, and end the other hosts."""
        self.executor.close()
        if self.leader is not None:
            disconnect()
        if self.disk is not None:
            self.disk.store.close()


def without_objects(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the policies, estimators and orders that are neither names nor classes nor functions."""
    return {
        name: value
        for name, value in flags.items()
        if name not in CHOICES or isinstance(value, str) or inspect.isclass(value) or inspect.isroutine(value)
    }


def check_choices(config: EngineConfig) -> None:
    """Raise `ConfigError` if the policy, the estimator or the order cannot be made. Classes are tried."""
    check_choice(config.scheduling.policy)
    make_estimator(config.scheduling.estimator)
    check_order_choice(config.scheduling.order)


def chunks(config: EngineConfig, shape: RunnerShape) -> bool:
    """Whether prefill is chunked; raises `ConfigError` if it cannot be as asked. Policies of the user's own chunk."""
    return _limits(config, shape).chunks(config.scheduling.policy)


def _limits(config: EngineConfig, shape: RunnerShape, draft_share: float = 0.0) -> SchedulerLimits:
    options, drafts = config.scheduling, config.scheduling.speculation
    pass_share = None if drafts.method == "ngram" else draft_share
    return SchedulerLimits(
        shape.buckets,
        shape.max_num_seqs,
        shape.max_model_len,
        options.max_chunk_tokens,
        options.chunked_prefill,
        options.preemption,  # pyright: ignore[reportArgumentType] # a choice of its option
        SpeculationLimits(*drafts[1:4], pass_share, drafts.method == "mtp", drafts.model is None),
        options.overload,
    )


def turn_end_ids(model_config: ModelDimensions, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens behind which clients cut their prompts: those that end a text, and the end of a message of gpt-oss."""
    end = tokenizer.added_token_id("<|end|>") if tokenizer else None
    return *end_token_ids(model_config, tokenizer), *([] if end is None else [end])


def end_token_ids(model_config: ModelDimensions, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text or a turn: the model's and its tokenizer's."""
    return tuple({*model_config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())})


def as_invariant(config: EngineConfig, model: ServedModel, params: Params) -> EngineConfig:
    """The options with which a model is served: with `batch_invariant`, attention is `ordered`.

    Raises:
        ConfigError: the bits would depend on the batch with another option, with this model or on these devices.
    """
    advanced = config.advanced
    if not advanced.batch_invariant:
        return config
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    own = model.config
    experts, sinks = (own.experts is not None, own.sinks) if isinstance(own, ModelConfig) else (False, False)
    refuse_any(
        "batch_invariant cannot be combined with this option",
        (jax.default_backend() != "cpu", f"JAX on a {jax.default_backend()}", "JAX_PLATFORMS=cpu"),
        (dtype_name(config.model.dtype) != "float32", f"dtype={config.model.dtype}", "dtype=float32"),
        (any(map(is_quantized, leaves)), "quantised weights", "quantization=none"),
        (config.model.activation_dtype != "auto", f"activation_dtype={config.model.activation_dtype}", "auto"),
        (config.cache.kv_cache_dtype != "auto", f"kv_cache_dtype={config.cache.kv_cache_dtype}", "auto"),
        (len(leaves[0].sharding.device_set) > 1, "several devices", "one device"),
        (config.scheduling.speculation.num_speculative_tokens > 0, "speculative_config", "no drafts"),
        (experts, "a model with experts", "another model"),
        (sinks, "a model with attention sinks", "another model"),
        (bool(states_of(model)), "a model with recurrent layers", "another model"),
        (advanced.attention not in ("auto", "ordered"), f"attention={advanced.attention}", "attention=auto"),
        (
            config.scheduling.max_num_batched_tokens < fewest_rows(own.hidden_size),
            f"max_num_batched_tokens={config.scheduling.max_num_batched_tokens}",
            f"at least {fewest_rows(own.hidden_size)}",
        ),
    )
    return replace(config, advanced=replace(advanced, attention="ordered"))
