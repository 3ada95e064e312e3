"""Puts an engine together. Weights and executables outlive engines; every engine starts with empty pages."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jinfercept.config import EngineConfig
from jinfercept.engine.clock import RealClock
from jinfercept.engine.engine import Engine
from jinfercept.engine.text_stream import TextStream
from jinfercept.errors import ConfigError
from jinfercept.hosts.leading import LeadingRunner
from jinfercept.intercept.dispatcher import Dispatcher
from jinfercept.kv.manager import KVManager
from jinfercept.meter.engine_stats import EngineStats
from jinfercept.models.protocol import ModelDimensions
from jinfercept.request import Request
from jinfercept.runner.runner import ForwardTicket, ModelRunner, RunnerShape, StepTicket
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.conformance import check_shape
from jinfercept.sched.estimator import ESTIMATORS, Estimator
from jinfercept.sched.observer import Observer, Observers
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Policy
from jinfercept.sched.profile import Profile
from jinfercept.startup.memory import MemoryPlan
from jinfercept.startup.several_hosts import disconnect
from jinfercept.tokenizer.tokenizer import Tokenizer

Recorder = Callable[[KVManager, PolicyInputs], tuple[Observer, Estimator]]
"""Makes an observer of a scheduler, and the estimator that learns of its calls: the policy's own, or one that wraps it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded model, its executables and their profile. Engines run on it, one at a time.

    Attributes:
        runner: of this process.
        leader: the same, on host 0 of several: what it executes, all hosts execute.
    """

    model_config: ModelDimensions
    tokenizer: Tokenizer | None
    runner: ModelRunner
    shape: RunnerShape
    profile: Profile
    leader: LeadingRunner[ForwardTicket, StepTicket] | None = None

    @property
    def executor(self) -> ModelRunner | LeadingRunner[ForwardTicket, StepTicket]:
        """What executes an engine's plans."""
        return self.leader or self.runner

    def close(self) -> None:
        """Free the weights and the pages, and end the other hosts."""
        self.executor.close()
        if self.leader is not None:
            disconnect()


class Assembled(NamedTuple):
    """An engine, the dispatcher of its calls, and its stats."""

    engine: Engine
    dispatcher: Dispatcher
    meter: EngineStats


def assemble(
    machine: Machine,
    config: EngineConfig,
    memory_plan: MemoryPlan,
    policy: Policy | str | None,
    record: Recorder | None,
) -> Assembled:
    """An engine under the policy given, or under the one that the options name. Raises `ConfigError` as `_recorded` does."""
    shape, tokenizer, page_size = machine.shape, machine.tokenizer, machine.shape.page_size
    estimator = ESTIMATORS[config.scheduling.estimator]()
    limits = _limits(config, shape)
    build = plan_scheduler(machine.profile, estimator, _chosen(config, policy), limits, page_size)
    kv = KVManager(
        shape.num_pages,
        memory_plan.host_tokens // page_size,
        page_size,
        identity=f"{machine.model_config} {config.model.dtype}",
        prefix_caching=config.cache.enable_prefix_caching,
        most_moved_pages=max(1, memory_plan.moved_tokens // page_size),
    )
    clock = RealClock()
    meter = observer = EngineStats(clock.now, kv, build.known, synchronous=build.policy.synchronous)
    if record is not None:
        recorder, estimator = _recorded(record, kv, build.known)
        observer = Observers(meter, recorder)
    scheduler = build.build(kv, observer, estimator)
    wake = threading.Event()
    dispatcher = Dispatcher(wake.set)
    engine = Engine(
        scheduler,
        machine.executor,
        dispatcher,
        clock,
        wake,
        depth=config.advanced.pipeline_depth,
        vocab_size=machine.model_config.vocab_size,
        eos_token_ids=end_token_ids(machine.model_config, tokenizer),
        open_text=_text_opener(tokenizer) if tokenizer else None,
        encode=partial(tokenizer.encode, plain=True) if tokenizer else None,
        seed=config.model.seed,
        check=config.advanced.check_pages,
        observe=meter.planned,
    )
    return Assembled(engine, dispatcher, meter)


def _recorded(record: Recorder, kv: KVManager, known: PolicyInputs) -> tuple[Observer, Estimator]:
    """The recorder's observer and estimator. Raises `ConfigError` if it returns anything else."""
    if not callable(record):
        raise ConfigError("record is a function", got=repr(record)[:80], fix="see assembly.Recorder")
    made: object = record(kv, known)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError("record returns two things", got=repr(made)[:80], fix="an Observer and an Estimator")
    check_shape("what record returns first", made[0], Observer)
    check_shape("what record returns second", made[1], Estimator)
    return made


def chunks(config: EngineConfig, shape: RunnerShape, policy: Policy | str | None) -> bool:
    """Whether prefill is chunked; raises `ConfigError` if it cannot be as asked. Policies without a name chunk."""
    return _limits(config, shape).chunks(_chosen(config, policy))


def _chosen(config: EngineConfig, policy: Policy | str | None) -> Policy | str:
    """The policy given, or the name of the one that the options choose, which follow a name that is given."""
    return config.scheduling.policy if policy is None or isinstance(policy, str) else policy


def _limits(config: EngineConfig, shape: RunnerShape) -> SchedulerLimits:
    options = config.scheduling
    return SchedulerLimits(
        shape.buckets,
        shape.max_num_seqs,
        shape.max_model_len,
        options.max_chunk_tokens,
        options.chunked_prefill,
        options.preemption,  # pyright: ignore[reportArgumentType] # a choice of its option
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
