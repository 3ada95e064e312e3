"""The composition root and the offline API: a model, its pages, a scheduler, a runner and an engine, behind one class."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from jinfercept.clock import RealClock
from jinfercept.config import EngineConfig
from jinfercept.engine import Engine
from jinfercept.errors import ConfigError, RequestError
from jinfercept.inputs import Prompt, make_requests
from jinfercept.intercept.dispatcher import Dispatcher
from jinfercept.kv.manager import KVManager
from jinfercept.metrics import CompileCounter
from jinfercept.models.config import ModelConfig
from jinfercept.models.embedded import cache_directory
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.profiler import EFFORTS, measure, profile_path, remember, remembered
from jinfercept.request import Detector, Event, Finished, Request, RequestOutput, SamplingParams, Tool
from jinfercept.runner import ModelRunner, RunnerShape
from jinfercept.sched.draft import Counters
from jinfercept.sched.estimator import ESTIMATORS, Estimator
from jinfercept.sched.observer import Observer
from jinfercept.sched.policies import SETTINGS, Knowledge, check_name
from jinfercept.sched.policy import Policy
from jinfercept.sched.prefill import chunks_prefill
from jinfercept.sched.profile import Profile, load_profile
from jinfercept.sched.scheduler import Scheduler
from jinfercept.start import StartTimes, load_model, plan_pools, prepare_backend, profile_settings
from jinfercept.stream import TextStream
from jinfercept.tokenizer import Tokenizer, load_tokenizer

_RESTART_FLAGS = {
    *(
        "policy",
        "estimator",
        "pipeline_depth",
        "max_chunk_tokens",
        "chunked_prefill",
        "preemption",
        "swap_space",
        "enable_prefix_caching",
        "seed",
        "check_pages",
    )
}

Recorder = Callable[[KVManager, Knowledge], tuple[Observer, Estimator]]
"""Makes what observes a scheduler, and the estimator that is told of calls instead of the policy's (which may be the same)."""


@final
class LLM:
    """A model that generates, and pauses for its tools.

    Args:
        model: `smollm2-135m`, a Hugging Face directory, a `.gguf` file, a `ModelConfig` (with `load_format="dummy"`), or a
            `Model` whose weights are in `params`.
        params: the weights of a `Model` that is already in memory.
        tokenizer: instead of the one beside the weights.
        policy: instead of one by name; see `sched.policy`.
        profile: what steps and transfers cost, instead of one by name or a measurement.
        progress: told (what, done, total) while starting.
        quiet: do not print the memory plan to standard error.
        flags: the options of the command line, by the same names: `dtype`, `max_model_len`, `kv_tokens`, … (`config.py`).

    Raises:
        ConfigError: an option is unknown, out of range or impossible together with the others.
        ModelError: the model cannot be found, read or used.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | ServedModel,
        *,
        params: Params | None = None,
        tokenizer: Tokenizer | None = None,
        policy: Policy | str | None = None,
        profile: Profile | str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        quiet: bool = False,
        **flags: Any,
    ) -> None:
        if isinstance(policy, str):
            flags["policy"] = policy
        if isinstance(profile, str | Path):
            flags["profile"] = str(profile)
        config = self.config = EngineConfig.from_flags(flags)
        self._flags = flags
        check_name(config.scheduler.policy)
        asked = config.scheduler.profile
        if asked is not None and asked not in EFFORTS:
            profile = load_profile(asked)
        prepare_backend(config)
        progress = progress or (lambda what, done, total: None)
        progress("loading", 0, 1)
        began_s = time.monotonic()
        loaded = load_model(model, params, config)
        self.tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
        self.model = loaded.model
        progress("loading", 1, 1)
        loaded_s = time.monotonic()
        with closing(CompileCounter()) as compilations:
            self.memory_plan, shape = plan_pools(loaded.model, loaded.params, config)
            if not quiet:
                print(self.memory_plan, file=sys.stderr)
            _chunks(config, shape, policy)
            self.runner = ModelRunner(loaded.model, loaded.params, shape, attention=config.runner.attention)
            self.runner.warm_up(progress)
        self._shape = shape
        warm_s = time.monotonic()
        if isinstance(profile, Profile):
            self.profile, how = profile, "given"
        else:
            self.profile, how = self._measured(asked, progress)
        self.start_times = StartTimes(
            load_s=loaded_s - began_s,
            compile_s=warm_s - loaded_s,
            num_executables=compilations.count,
            num_cached=compilations.cached,
            profile_s=time.monotonic() - warm_s,
            profile=how,
        )
        if not quiet:
            print(self.start_times, file=sys.stderr)
        self._numbers = count()
        self._lock = threading.Lock()
        self._busy: int | None = None  # the thread that holds the lock
        self._closed = False
        self.engine = self._engine(policy)

    def restart(self, policy: Policy | str | None = None, record: Recorder | None = None, **flags: Any) -> None:
        """Start over with other scheduling options, empty pages and counters at zero; nothing is loaded or compiled again.

        Args:
            policy: by name, or one of your own; the name chosen last by default.
            record: observes the scheduler.
            flags: any of `estimator`, `pipeline_depth`, `max_chunk_tokens`, `chunked_prefill`, `swap_space`,
                `enable_prefix_caching`, `seed` and `check_pages`; the others keep their values.

        Raises:
            ConfigError: an option is fixed once executables are compiled, or out of range.
        """
        if isinstance(policy, str):
            flags["policy"] = policy
        fixed = sorted(set(flags) - _RESTART_FLAGS)
        if fixed:
            raise ConfigError(
                "only a new LLM can change this", got=", ".join(fixed), fix=f"change {sorted(_RESTART_FLAGS)}"
            )
        config = EngineConfig.from_flags(self._flags | flags)
        check_name(config.scheduler.policy)
        _chunks(config, self._shape, policy)
        with self._alone("restart()"):
            self.memory_plan = self.memory_plan.with_host(config.cache)
            self._flags, self.config = self._flags | flags, config
            self._shut_down()
            self.runner.reset()
            self.engine = self._engine(policy, record)

    def _measured(self, effort: str | None, progress: Callable[[str, int, int], None]) -> tuple[Profile, str]:
        """What steps and transfers cost here, and how it is known: measured now if an effort is named, else as it was last."""
        settings = profile_settings(self.model, self.runner.params, self._shape, self.config)
        path = profile_path(cache_directory(), settings)
        known = remembered(path) if effort is None else None
        if known is not None:
            return known, "remembered"
        profile = measure(
            self.runner,
            self._shape,
            name=f"{self.model.config.family} of {self.model.config.num_layers} layers on {settings['device']}",
            kv_bytes_per_token=kv_bytes_per_token(self.model.config, str(settings["dtype"])),
            effort=EFFORTS[effort or "quick"],
            settings=settings,
            progress=progress,
        )
        with suppress(OSError):  # a cache that cannot be written costs the next start a moment
            remember(profile, path)
        return profile, "measured"

    def _engine(self, policy: Policy | str | None, record: Recorder | None = None) -> Engine:
        """An engine under the policy given, or under the one that the options name."""
        config, model_config, shape = self.config, self.model.config, self._shape
        page_size = shape.page_size
        options, profile = config.scheduler, self.profile
        estimator, whole_prompts = ESTIMATORS[options.estimator](), not _chunks(config, shape, policy)
        saturation = max((size for size in shape.buckets if size <= profile.saturation), default=shape.buckets[0])
        known = Knowledge(profile, saturation, page_size, estimator)
        if policy is None or isinstance(policy, str):
            policy = known.make(config.scheduler.policy)
        kv = KVManager(
            shape.num_pages,
            self.memory_plan.host_tokens // page_size,
            page_size,
            identity=f"{model_config} {config.model.dtype}",
            prefix_caching=config.cache.enable_prefix_caching,
        )
        observer, told = (None, estimator) if record is None else record(kv, known)
        scheduler = Scheduler(
            kv,
            policy,
            profile,
            told,
            buckets=shape.buckets,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            chunk_tokens=options.max_chunk_tokens or shape.buckets[-1],
            whole_prompts=whole_prompts,
            observer=observer,
            preemption=options.preemption,  # pyright: ignore[reportArgumentType] # a choice of its option
        )
        tokenizer = self.tokenizer
        wake = threading.Event()
        self._dispatcher = Dispatcher(wake.set)
        return Engine(
            scheduler,
            self.runner,
            self._dispatcher,
            RealClock(),
            wake,
            depth=config.runner.pipeline_depth,
            vocab_size=model_config.vocab_size,
            eos_token_ids=tuple({*model_config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}),
            open_text=_text_opener(tokenizer) if tokenizer else None,
            encode=partial(tokenizer.encode, plain=True) if tokenizer else None,
            seed=config.model.seed,
            check=config.runner.check_pages,
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Tool] = (),
        detector: Detector | Iterable[Detector | None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """Serve prompts together, to the end.

        Args:
            prompts: one or several texts or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all, or one for each.
            tools: what the model may call; those with a `start` text are found in what it writes. A tool must not use this
                LLM: it would wait for the very call that waits for it, until its time-out.
            detector: finds calls in another way; one for all, or one for each.
            on_event: told of tokens, calls, results and ends as they happen.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a request can never be served; none is started then.
        """
        ids = (f"request-{number}" for number in self._numbers)
        requests = make_requests(ids, prompts, sampling_params, tools, detector, self.tokenizer)
        outputs: dict[str, RequestOutput] = {}
        with self._alone("generate()"):
            submitted: dict[str, None] = {}
            try:
                for request in requests:
                    self.engine.submit(request)
                    submitted[request.id] = None
                while len(outputs) < len(requests):
                    for event in self.engine.step():
                        if isinstance(event, Finished) and event.request_id in submitted:
                            outputs[event.request_id] = event.output
                        if on_event is not None:
                            on_event(event)
            except BaseException:
                self._abort_all()
                raise
        return [outputs[request.id] for request in requests]

    @property
    def shape(self) -> RunnerShape:
        """The static sizes that everything was compiled for."""
        return self._shape

    @property
    def counters(self) -> Counters:
        """What the scheduler has done since the start."""
        return self.engine.scheduler.counters

    def close(self) -> None:
        """Give up what is running and free the weights and the pages."""
        if self._closed:
            return
        with self._alone("close()"):
            self._closed = True
            self._shut_down()
            self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut_down(self) -> None:
        self.engine.close()
        self._dispatcher.close()

    def _abort_all(self) -> None:
        """Give up whatever `generate` has begun; its pages are free then."""
        self.engine.close()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One thread at a time; others wait, but the one that is in already would wait for itself."""
        if self._busy == threading.get_ident():
            raise RequestError(
                f"{what} from within generate()", got="a callback that calls its own LLM", fix="return first"
            )
        with self._lock:
            if self._closed:
                raise RequestError("this LLM is closed", got=what, fix="make a new one")
            self._busy = threading.get_ident()
            try:
                yield
            finally:
                self._busy = None


def _chunks(config: EngineConfig, shape: RunnerShape, policy: Policy | str | None) -> bool:
    """Whether prefill is chunked; raises `ConfigError` if it cannot be as asked. Policies without a name chunk."""
    options = config.scheduler
    return chunks_prefill(
        options.chunked_prefill,
        published=SETTINGS[options.policy].chunked_prefill if policy is None or isinstance(policy, str) else True,
        largest_step=shape.buckets[-1],
        longest=shape.max_model_len,
        chunk_tokens=options.max_chunk_tokens,
    )


def _text_opener(tokenizer: Tokenizer) -> Callable[[Request], TextStream]:
    def open_text(request: Request) -> TextStream:
        params = request.params
        stop = tuple(params.stop or ())
        return TextStream(tokenizer, stop, params.include_stop_str_in_output, params.skip_special_tokens)

    return open_text
