"""What engines run on, and an engine of it. Weights and executables outlive engines; every engine starts with empty pages."""

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

from jinfercept.config import EngineConfig, RestartOptions
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.clock import RealClock
from jinfercept.engine.disk_contexts import DiskContexts
from jinfercept.engine.engine import Engine
from jinfercept.engine.text_stream import TextStream
from jinfercept.errors import ConfigError
from jinfercept.hosts.leading import LeadingRunner
from jinfercept.intercept.dispatcher import Dispatcher
from jinfercept.kv.manager import KVManager
from jinfercept.kv.states import StateSizes
from jinfercept.meter.engine_stats import EngineStats
from jinfercept.meter.request_log import RequestLog
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.load import dtype_name
from jinfercept.models.protocol import ModelDimensions, ServedModel
from jinfercept.request import Request
from jinfercept.runner.disk_pages import DiskPages
from jinfercept.runner.pools import Pool
from jinfercept.runner.runner import ForwardTicket, ModelRunner, StepTicket
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import EstimatorChoice, make_estimator
from jinfercept.sched.orders import OrderChoice, check_order_choice
from jinfercept.sched.policies import PolicyChoice, check_choice
from jinfercept.sched.profile import Profile
from jinfercept.sched.speculation import SpeculationLimits
from jinfercept.startup.disk_tier import DiskTier
from jinfercept.startup.invariant import as_invariant
from jinfercept.startup.memory import MemoryPlan
from jinfercept.startup.recurrent import as_served
from jinfercept.startup.served_adapters import ServedAdapters
from jinfercept.startup.several_hosts import disconnect
from jinfercept.tokenizer.tokenizer import Tokenizer

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
class OwnParts:
    """A policy, an estimator and an order that are classes or objects; None where those count that the options name."""

    policy: PolicyChoice | None = None
    estimator: EstimatorChoice | None = None
    order: OrderChoice | None = None

    @classmethod
    def take(cls, flags: dict[str, Any], **choices: object) -> Self:
        """Parts from choices by keyword; a text is no part but goes into `flags`."""
        flags |= {name: choice for name, choice in choices.items() if isinstance(choice, str)}
        own: dict[str, Any] = {name: choice for name, choice in choices.items() if name not in flags}
        return cls(**own)

    def following(self, before: Self, flags: Mapping[str, Any]) -> Self:
        """These parts for the next engine, with the classes and functions of the one before where nothing else is chosen.

        Args:
            before: parts of the engine before; an object among them has the state of that one.
            flags: options of the next engine; a name among them is chosen.
        """
        parts = {
            name: part
            for name in ("policy", "estimator", "order")
            if getattr(self, name) is None and name not in flags
            if inspect.isclass(part := getattr(before, name)) or inspect.isroutine(part)
        }
        return replace(self, **parts)

    def filled(self, config: EngineConfig) -> tuple[PolicyChoice, EstimatorChoice, OrderChoice]:
        """The policy, the estimator and the order, of the options where there is none."""
        options = config.scheduling
        return (
            options.policy if self.policy is None else self.policy,
            options.estimator if self.estimator is None else self.estimator,
            options.order if self.order is None else self.order,
        )

    def check(self, config: EngineConfig) -> None:
        """Raise `ConfigError` if the policy, the estimator or the order cannot be made. Classes are tried."""
        policy, estimator, order = self.filled(config)
        check_choice(policy)
        make_estimator(estimator)
        check_order_choice(order)


class Assembled(NamedTuple):
    """An engine, the dispatcher of its calls, and its stats."""

    engine: Engine
    dispatcher: Dispatcher
    meter: EngineStats


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A model that is loaded and compiled, and the options of the engines that run on it, one at a time.

    Attributes:
        leader: executes on all of several hosts what host 0 executes; None: there is one host.
        draft_model: name of the model that drafts for this one; None: there is none.
        disk: contexts on disk; None: there is no such tier.
        room: of adapters; None: the model has no room for any.
        flags: the options as they were given, by name.
        config: the same, with defaults, in sections.
        own: a policy, an estimator and an order instead of those that the options name.
        memory_plan: sizes of the pools.
        times: seconds that the start took.
        sampling_defaults: fields of `SamplingParams` whose defaults come from the checkpoint's `generation_config.json`.
        name: of the model, as it was given, or of its family.
    """

    model: ServedModel
    tokenizer: Tokenizer | None
    runner: ModelRunner
    shape: RunnerShape
    profile: Profile
    leader: LeadingRunner[ForwardTicket, StepTicket] | None
    draft_model: str | None
    disk: DiskTier | None
    room: ServedAdapters | None
    flags: Mapping[str, Any]
    config: EngineConfig
    own: OwnParts
    memory_plan: MemoryPlan
    times: StartTimes
    sampling_defaults: Mapping[str, Any]
    name: str

    @property
    def adapters(self) -> AdapterTable:
        """The adapters by name; an empty table if there is no room for any."""
        return AdapterTable() if self.room is None else self.room.table

    @property
    def executor(self) -> ModelRunner | LeadingRunner[ForwardTicket, StepTicket]:
        """The executor of an engine's plans."""
        return self.leader or self.runner

    def settings(self) -> AbstractContextManager[None]:
        """A context with the settings of JAX under which the runner works in any thread, see `own_settings`."""
        return own_settings(self.runner.device)

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
        config = as_invariant(config, self.model, self.runner.params)
        fixed = sorted(set(flags) - CHANGEABLE)
        if fixed:
            raise ConfigError(
                "restart cannot change this option", got=", ".join(fixed), fix=f"change {sorted(CHANGEABLE)}"
            )
        drafter, loaded = config.scheduling.speculation.model, self.draft_model
        if drafter not in (None, loaded):
            raise ConfigError(
                "restart cannot load another draft model", got=drafter, fix=f"{loaded or 'ngram'}, or a new LLM"
            )
        drafts, most = config.scheduling.speculation.num_speculative_tokens, self.shape.num_drafts
        if drafts > most:
            raise ConfigError(
                "this LLM was compiled for fewer draft tokens", got=drafts, fix=f"at most {most}, or a new LLM"
            )
        own.check(config)
        chunks(config, self.shape, own)
        memory_plan = self.memory_plan.with_host(config.cache)
        return replace(self, flags=merged, config=config, own=own, memory_plan=memory_plan)

    def assemble(self) -> Assembled:
        """A new engine with empty pages."""
        shape, tokenizer, config, memory_plan = self.shape, self.tokenizer, self.config, self.memory_plan
        model_config, page_size = self.model.config, shape.page_size
        policy, chosen, order = self.own.filled(config)
        limits = _limits(config, shape, self.profile.draft_share)
        self.runner.drafting = config.scheduling.speculation.method == "draft_model"
        profile = self.profile if self.disk is not None else self.profile.without_disk()
        build = plan_scheduler(profile, make_estimator(chosen), policy, limits, page_size, order)
        kv = KVManager(
            shape.num_pages,
            memory_plan.host_tokens // page_size,
            page_size,
            identity=f"{model_config} {config.model.dtype} {config.model.activation_dtype} {config.cache.kv_cache_dtype}",
            prefix_caching=config.cache.enable_prefix_caching,
            most_moved_pages=max(1, memory_plan.moved_tokens // page_size),
            states=StateSizes(shape.num_states, memory_plan.states.num_host_states, memory_plan.state_size(page_size)),
            windows=memory_plan.windows,
        )
        clock = RealClock()
        log = RequestLog(clock.now)
        meter = EngineStats(log, kv, build.inputs, synchronous=build.policy.synchronous)
        scheduler = build.build(kv, log)
        wake = threading.Event()
        dispatcher = Dispatcher(wake.set)
        disk = None
        if self.disk is not None and isinstance(self.runner.kv, Pool):
            store, identity = self.disk
            pages = DiskPages(store, self.runner.kv, identity, page_size, self.settings, wake.set)
            disk = DiskContexts(scheduler, pages, self.profile, shape.buckets[-1])
        engine = Engine(
            scheduler,
            self.executor,
            dispatcher,
            clock,
            wake,
            depth=config.advanced.pipeline_depth,
            vocab_size=model_config.vocab_size,
            eos_token_ids=end_token_ids(model_config, tokenizer),
            open_text=_text_opener(tokenizer) if tokenizer else None,
            encode=partial(tokenizer.encode, plain=True) if tokenizer else None,
            seed=config.model.seed,
            check=config.advanced.check_pages,
            request_log=log,
            disk=disk,
            returns_experts=shape.routed_experts > 0,
            adapters=self.adapters,
        )
        return Assembled(engine, dispatcher, meter)

    def close(self) -> None:
        """Free the weights and the pages, and end the other hosts."""
        self.executor.close()
        if self.leader is not None:
            disconnect()
        if self.disk is not None:
            self.disk.store.close()


def chunks(config: EngineConfig, shape: RunnerShape, own: OwnParts) -> bool:
    """Whether prefill is chunked; raises `ConfigError` if it cannot be as asked. Policies of the user's own chunk."""
    return _limits(config, shape).chunks(own.filled(config)[0])


def _limits(config: EngineConfig, shape: RunnerShape, draft_share: float = 0.0) -> SchedulerLimits:
    options, drafts = config.scheduling, config.scheduling.speculation
    pass_share = draft_share if drafts.method == "draft_model" else None
    return SchedulerLimits(
        shape.buckets,
        shape.max_num_seqs,
        shape.max_model_len,
        options.max_chunk_tokens,
        options.chunked_prefill,
        options.preemption,  # pyright: ignore[reportArgumentType] # a choice of its option
        SpeculationLimits(*drafts[1:4], pass_share),
    )


def end_token_ids(model_config: ModelDimensions, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text or a turn: the model's and its tokenizer's."""
    return tuple({*model_config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())})


def _text_opener(tokenizer: Tokenizer) -> Callable[[Request], TextStream]:
    def open_text(request: Request) -> TextStream:
        params = request.params
        stop = tuple(params.stop or ())
        return TextStream(
            tokenizer, stop, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens
        )

    return open_text
