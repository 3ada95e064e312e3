"""The composition root and the offline API: a model, its pages, a scheduler, a runner and an engine, behind one class."""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import jax
import psutil

from jinfercept.clock import RealClock
from jinfercept.config import EngineConfig
from jinfercept.engine import Engine
from jinfercept.errors import ConfigError, ModelError, RequestError
from jinfercept.intercept.detector import StopStringDetector
from jinfercept.intercept.dispatcher import Dispatcher
from jinfercept.kv.manager import KVManager
from jinfercept.models.config import ModelConfig
from jinfercept.models.embedded import cache_directory
from jinfercept.models.load import Loaded, load
from jinfercept.models.model import Model, Params, kv_bytes_per_token
from jinfercept.request import Detector, Event, Finished, Request, RequestOutput, SamplingParams, Tool
from jinfercept.runner import ModelRunner, RunnerShape
from jinfercept.sched.cost import AffineCost
from jinfercept.sched.estimator import ESTIMATORS
from jinfercept.sched.policies import Knowledge, check_name
from jinfercept.sched.policy import Policy
from jinfercept.sched.scheduler import Counters, Scheduler
from jinfercept.stream import TextStream
from jinfercept.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Mapping[str, Any]
"""A text, or `{"prompt_token_ids": [...]}`; `"cache_salt"` and `"prompt"` may stand beside either."""

GIB = 1 << 30

_RESTART_FLAGS = {
    *(
        "policy",
        "estimator",
        "pipeline_depth",
        "max_chunk_tokens",
        "swap_space",
        "enable_prefix_caching",
        "seed",
        "check_pages",
    )
}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine takes, in bytes, and what it can hold, in tokens."""

    weight_bytes: int
    kv_bytes: int
    host_bytes: int
    kv_tokens: int
    host_tokens: int
    max_model_len: int

    def __str__(self) -> str:
        return (
            f"memory plan: weights {_gib(self.weight_bytes)}, KV pool {_gib(self.kv_bytes)} for {self.kv_tokens:,} tokens, "
            f"host copies up to {_gib(self.host_bytes)} for {self.host_tokens:,} tokens; "
            f"sequences of up to {self.max_model_len:,} tokens"
        )


@final
class LLM:
    """A model that generates, and pauses for its tools.

    Args:
        model: `smollm2-135m`, a Hugging Face directory, a `.gguf` file, a `ModelConfig` (with `load_format="dummy"`), or a
            `Model` whose weights are in `params`.
        params: the weights of a `Model` that is already in memory.
        tokenizer: instead of the one beside the weights.
        policy: instead of one by name; see `sched.policy`.
        progress: told (what, done, total) while starting.
        quiet: do not print the memory plan to standard error.
        flags: the options of the command line, by the same names: `dtype`, `max_model_len`, `kv_tokens`, … (`config.py`).

    Raises:
        ConfigError: an option is unknown, out of range or impossible together with the others.
        ModelError: the model cannot be found, read or used.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | Model,
        *,
        params: Params | None = None,
        tokenizer: Tokenizer | None = None,
        policy: Policy | str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        quiet: bool = False,
        **flags: Any,
    ) -> None:
        if isinstance(policy, str):
            flags["policy"] = policy
        config = self.config = EngineConfig.from_flags(flags)
        self._flags = flags
        check_name(config.scheduler.policy)
        _prepare_backend(config)
        progress = progress or (lambda what, done, total: None)
        progress("loading", 0, 1)
        loaded = _load(model, params, config)
        self.tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
        self.model = loaded.model
        self.memory_plan = plan = _plan_memory(loaded.model.config, loaded.params, config)
        progress("loading", 1, 1)
        if not quiet:
            print(plan, file=sys.stderr)
        shape = _runner_shape(loaded.model.config, plan, config)
        self.runner = ModelRunner(loaded.model, loaded.params, shape, attention=config.runner.attention)
        self.runner.warm_up(progress)
        self._shape = shape
        self._ids = count()
        self._lock = threading.Lock()
        self._closed = False
        self.engine = self._engine(policy)

    def restart(self, policy: Policy | str | None = None, **flags: Any) -> None:
        """Start over with other scheduling options, empty pages and counters at zero; nothing is loaded or compiled again.

        Args:
            policy: by name, or one of your own; the name chosen last by default.
            flags: any of `pipeline_depth`, `max_chunk_tokens`, `swap_space`, `enable_prefix_caching`, `seed` and
                `check_pages`; the others keep their values.

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
        with self._lock:
            self._shut_down()
            self.runner.reset()
            self._flags, self.config = self._flags | flags, config
            self.memory_plan = _plan_memory(self.model.config, self.runner.params, config, self.memory_plan.kv_tokens)
            self.engine = self._engine(policy)

    def _engine(self, policy: Policy | str | None) -> Engine:
        """An engine under the policy given, or under the one that the options name."""
        config, model_config, shape = self.config, self.model.config, self._shape
        page_size = shape.page_size
        cost, estimator = AffineCost(), ESTIMATORS[config.scheduler.estimator]()
        if policy is None or isinstance(policy, str):
            policy = Knowledge(cost, shape.buckets[-1], page_size, estimator).make(config.scheduler.policy)
        kv = KVManager(
            shape.num_pages,
            self.memory_plan.host_tokens // page_size,
            page_size,
            identity=f"{model_config} {config.model.dtype}",
            prefix_caching=config.cache.enable_prefix_caching,
        )
        scheduler = Scheduler(
            kv,
            policy,
            cost,
            estimator,
            buckets=shape.buckets,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            chunk_tokens=config.scheduler.max_chunk_tokens or shape.buckets[-1],
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
            encode=tokenizer.encode if tokenizer else None,
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
            tools: what the model may call; those with a `start` text are found in what it writes.
            detector: finds calls in another way; one for all, or one for each.
            on_event: told of tokens, calls, results and ends as they happen.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a request can never be served; none is started then.
        """
        if self._closed:
            raise RequestError("this LLM is closed", got="generate()", fix="make a new one")
        requests = self._requests(prompts, sampling_params, list(tools), detector)
        outputs: dict[str, RequestOutput] = {}
        with self._lock:
            submitted = []
            try:
                for request in requests:
                    self.engine.submit(request)
                    submitted.append(request.id)
                while len(outputs) < len(requests):
                    for event in self.engine.step():
                        if isinstance(event, Finished):
                            outputs[event.request_id] = event.output
                        if on_event is not None:
                            on_event(event)
            except BaseException:
                self._abort([request_id for request_id in submitted if request_id not in outputs])
                raise
        return [outputs[request.id] for request in requests]

    @property
    def counters(self) -> Counters:
        """What the scheduler has done since the start."""
        return self.engine.scheduler.counters

    def close(self) -> None:
        """Give up what is running and free the weights and the pages."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
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

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
        while request_ids and self.engine.has_work:
            self.engine.step()

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        tools: list[Tool],
        detector: Detector | Iterable[Detector | None] | None,
    ) -> list[Request]:
        listed: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)  # pyright: ignore[reportAssignmentType]
        all_params = _one_each(params or SamplingParams(), SamplingParams, len(listed), "sampling_params")
        by_name = _by_name(tools)
        if detector is None and tools:
            if self.tokenizer is None:
                raise RequestError("without a tokenizer no text can open a call", got=[*by_name], fix="pass a detector")
            if not any(tool.start for tool in tools):
                raise RequestError(
                    "no tool says how a call begins", got=[*by_name], fix="give start and stop, or a detector"
                )
            detector = StopStringDetector(tools)
        detectors = _one_each(detector, None, len(listed), "detector")
        return [
            self._request(prompt, one_params, by_name, one_detector)
            for prompt, one_params, one_detector in zip(listed, all_params, detectors, strict=True)
        ]

    def _request(
        self, prompt: Prompt, params: SamplingParams, tools: dict[str, Tool], detector: Detector | None
    ) -> Request:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", got=params.stop, fix="use stop_token_ids")
        parts = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        if ids is None:
            if not isinstance(text, str):
                raise RequestError(
                    "a prompt is a text or has prompt_token_ids", got=repr(prompt)[:80], fix="give either"
                )
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer", got=text[:80], fix="give prompt_token_ids")
            ids = self.tokenizer.encode(text, add_special_tokens=True)
        salt = str(parts.get("cache_salt", ""))
        try:
            ids = tuple(int(token) for token in ids)
        except (TypeError, ValueError):
            raise RequestError(
                "prompt_token_ids are whole numbers", got=repr(ids)[:80], fix="give a list of them"
            ) from None
        return Request(f"request-{next(self._ids)}", ids, params, tools, detector, salt, text)


def _load(model: str | Path | ModelConfig | Model, params: Params | None, config: EngineConfig) -> Loaded:
    if isinstance(model, Model):
        if params is None:
            raise ModelError("a Model needs its weights", got="no params", fix="pass params=...")
        return Loaded(model, params, None, "dummy")
    if params is not None:
        raise ModelError(
            "params go with a Model", got=type(model).__name__, fix="pass Model(config), or leave params out"
        )
    options = config.model
    return load(model, dtype=options.dtype, load_format=options.load_format, seed=options.seed)  # pyright: ignore[reportArgumentType]


def _prepare_backend(config: EngineConfig) -> None:
    """What has to be set before the backend starts: room for host copies, and the compilation cache."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(math.ceil(config.cache.swap_space) + 4))
    if config.runner.compilation_cache and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _plan_memory(
    model_config: ModelConfig, params: Params, config: EngineConfig, kv_tokens: int | None = None
) -> MemoryPlan:
    """Sizes of the pools. Raises `ConfigError` before any of it is taken if it cannot work.

    Args:
        kv_tokens: size of a device pool that is there already.
    """
    cache = config.cache
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    first = next(iter(leaves.values()))
    token_bytes = kv_bytes_per_token(model_config, first.dtype)
    free = _free_bytes(first) + (kv_tokens or 0) * token_bytes
    asked = kv_tokens or cache.kv_tokens
    if asked is None:
        asked = min(16384, config.scheduler.max_num_seqs * model_config.max_position, free // 4 // token_bytes)
    kv_tokens = asked // cache.page_size * cache.page_size
    if kv_tokens < 2 or kv_tokens * token_bytes > free:
        raise ConfigError(
            "the KV pool does not fit",
            got=f"{kv_tokens} tokens of {token_bytes} bytes, {_gib(free)} free",
            fix="set kv_tokens to what fits, or use a smaller model or dtype",
        )
    limit = min(model_config.max_position, kv_tokens)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            "max_model_len is more than can be served",
            got=wanted,
            fix=f"at most {limit}: the model's {model_config.max_position} and the {kv_tokens} tokens of the KV pool",
        )
    host_tokens = int(cache.swap_space * GIB) // (token_bytes * cache.page_size) * cache.page_size
    return MemoryPlan(
        weight_bytes=sum(leaf.nbytes for leaf in leaves.values()),
        kv_bytes=(kv_tokens + cache.page_size) * token_bytes,
        host_bytes=host_tokens * token_bytes,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        max_model_len=wanted or limit,
    )


def _free_bytes(neighbour: jax.Array) -> int:
    """Free memory of the device that an array is on."""
    with suppress(Exception):  # not every backend keeps statistics
        stats = next(iter(neighbour.devices())).memory_stats()
        if stats and "bytes_limit" in stats:
            return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available


def _runner_shape(model_config: ModelConfig, plan: MemoryPlan, config: EngineConfig) -> RunnerShape:
    most = config.scheduler.max_num_batched_tokens
    sizes = [size for size in (1, 8, 32, 128, 512, 2048, 8192) if size < most]
    return RunnerShape(
        num_pages=plan.kv_tokens // config.cache.page_size,
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=plan.max_model_len,
        buckets=(*sizes, most),
        layers_per_step=min(config.runner.layers_per_step or 1, model_config.num_layers),
    )


def _text_opener(tokenizer: Tokenizer) -> Callable[[Request], TextStream]:
    def open_text(request: Request) -> TextStream:
        params = request.params
        stop = tuple(params.stop)
        return TextStream(tokenizer, stop, params.include_stop_str_in_output, params.skip_special_tokens)

    return open_text


def _by_name(tools: list[Tool]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if not isinstance(tool, Tool):
            raise RequestError(
                "tools are given as Tool(...)", got=repr(tool)[:80], fix="Tool(function, start=..., stop=...)"
            )
        if tool.name in by_name:
            raise RequestError("two tools have one name", got=tool.name, fix="give one of them another name")
        by_name[tool.name] = tool
    return by_name


def _one_each(value: Any, kind: type | None, number: int, name: str) -> list[Any]:
    """One value for everybody, or a list with one for each."""
    if value is None or not isinstance(value, list | tuple) or (kind is not None and isinstance(value, kind)):
        return [value] * number
    if len(value) != number:
        raise RequestError(
            f"{name} has one entry for each prompt", got=f"{len(value)} for {number}", fix="give one for all"
        )
    return list(value)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
