"""Every option of the engine, once: the fields of these groups are keyword arguments of `LLM` and flags of the command line.

`LLMOptions` repeats names and types for type checkers, which read keyword arguments from nothing else; a test compares the
two. Groups are frozen, and a class of the engine gets only its own. Imports nothing heavy.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, NamedTuple, Self, TypedDict, get_args, get_origin, get_type_hints

from jinfercept.errors import ConfigError, nearest, refuse_any, shown
from jinfercept.values import plain

DTypeChoice = Literal["auto", "float32", "bfloat16"]
KVDTypeChoice = Literal["auto", "int8", "fp8"]
ActivationDTypeChoice = Literal["auto", "int8"]
LoadFormatChoice = Literal["auto", "dummy"]
QuantizationChoice = Literal["auto", "none", "gguf", "gptq", "awq", "fp8", "mxfp4"]
StagingChoice = Literal[1, 2, 4, 8, 16, 32]
PreemptionChoice = Literal["auto", "policy", "recompute", "swap"]
AttentionChoice = Literal["auto", "triton", "mosaic", "tpu", "cpu", "ordered", "reference"]

_SPECULATIVE_EXAMPLE = 'such as {"method": "ngram", "num_speculative_tokens": 4}'
_DRAFT_MODEL_EXAMPLE = 'such as {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 4}'


class SpeculativeConfig(NamedTuple):
    """Drafts of the next tokens, which a step verifies; names and meaning as vLLM's."""

    #: "ngram" drafts from earlier occurrences of the last tokens, in the prompt, results of calls or the output;
    #: "draft_model" lets a smaller model write; "mtp" uses a layer of the model itself, in models that have one, or the
    #: assistant of a Gemma 4, which is the `model` then.
    method: str = "ngram"
    #: Most drafts of a sequence in a step; 0: none.
    num_speculative_tokens: int = 0
    #: Tokens of the shortest n-gram that "ngram" looks up; the longest has `prompt_lookup_max`.
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    #: The draft model or assistant, by name or path as `LLM` takes it. It has the served model's tokens.
    model: str | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None) -> Self:
        """Reads a mapping or its JSON; None asks for no drafts. Raises `ConfigError`."""
        flag = "speculative_config"
        if value is None:
            return cls()
        try:
            values: Any = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ConfigError(f"{flag} is no JSON", got=str(error), fix=_SPECULATIVE_EXAMPLE) from None
        if not isinstance(values, dict):
            raise ConfigError(f"{flag} is an object", got=shown(values), fix=_SPECULATIVE_EXAMPLE)
        if unknown := sorted(set(values) - set(cls._fields)):
            raise ConfigError(f"{flag} has the keys {', '.join(cls._fields)}", got=", ".join(unknown), fix="no others")
        model = values.get("model")
        values = {"method": "ngram" if model is None else "draft_model", **values}
        config = cls(**values)
        if config.method not in ("ngram", "draft_model", "mtp"):
            fix = "ngram, draft_model or mtp"
            raise ConfigError(f"the method of {flag} is unknown", got=shown(config.method), fix=fix)
        if config.method == "ngram" and model is not None:
            raise ConfigError(
                f"{flag} needs no model for this method", got=shown(value), fix="leave out model, or draft_model"
            )
        is_named = isinstance(model, str) and model
        if not is_named and (config.method == "draft_model" or model is not None):
            raise ConfigError(f"{flag} lacks the draft model", got=shown(value), fix=_DRAFT_MODEL_EXAMPLE)
        if not all(type(number) is int and number >= 1 for number in config[1:4]):
            raise ConfigError(f"{flag} has whole numbers from 1 on", got=shown(value), fix=_SPECULATIVE_EXAMPLE)
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        if "prompt_lookup_min" not in values:
            shortest = min(shortest, longest)
        if "prompt_lookup_max" not in values:
            longest = max(shortest, longest)
        if shortest > longest:
            raise ConfigError("prompt_lookup_min is more than prompt_lookup_max", got=shown(value), fix="lower it")
        return config._replace(prompt_lookup_min=shortest, prompt_lookup_max=longest)


MAX_BIAS = 100
"""Largest bias of a logit, as in `SamplingParams.logit_bias`."""


def option(default: Any, text: str, *aliases: str, least: float | None = None, most: float | None = None) -> Any:
    """A field with its default, its help text, other flags that mean the same, and its least and greatest value."""
    return field(default=default, metadata={"help": text, "aliases": aliases, "least": least, "most": most})


def check_bounds(options: Any) -> None:
    """Raise `ConfigError` for a field outside its bounds, and for one that is infinite."""
    for at in fields(options):
        value, least, most = getattr(options, at.name), at.metadata["least"], at.metadata["most"]
        if least is not None and value is not None and not value >= least:
            raise ConfigError(f"{at.name} is too small", got=value, fix=f"at least {least}")
        if least is not None and value == math.inf:
            raise ConfigError(f"{at.name} is not finite", got=value, fix="give a number")
        if most is not None and value is not None and value > most:
            raise ConfigError(f"{at.name} is too large", got=value, fix=f"at most {most}")


def without_none(hint: Any) -> Any:
    """`int` of `int | None`; any other type as it is."""
    arguments = get_args(hint)
    return arguments[0] if NoneType in arguments else hint


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` unless a value fits its annotation: a class, a `Literal`, or one of these or None."""
    if (value is None and NoneType in get_args(hint)) or (isinstance(value, dict) and dict[str, Any] in get_args(hint)):
        return
    bare_hint = without_none(hint)
    if get_origin(bare_hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is a list of texts", got=shown(value), fix="give several, or one in a list")
        return
    choices = get_args(bare_hint)
    kind = type(choices[0]) if choices else bare_hint
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name} has the wrong type", got=shown(value), fix=f"give a value of type {kind.__name__}")
    if choices and value not in choices:
        raise ConfigError(
            f"{name} is one of {', '.join(map(str, choices))}", got=shown(value), fix="choose one of them"
        )


@dataclass(frozen=True)
class ModelOptions:
    """The model, and the defaults of its requests."""

    dtype: DTypeChoice = option("auto", "type of weights and KV; auto: float32 on a CPU, bfloat16 on a GPU")
    load_format: LoadFormatChoice = option("auto", "dummy: random weights for a checkpoint's config")
    quantization: QuantizationChoice = option(
        "auto",
        "format of the checkpoint's quantised weights (gguf, gptq, awq, fp8, mxfp4), which stay so on the device; none: they "
        "are dequantised while they are loaded; auto: they stay, but for GGUF files on a CPU without kernels",
        "-q",
    )
    activation_dtype: ActivationDTypeChoice = option(
        "auto",
        "format in which activations enter products with quantised weights; auto: the dtype; int8: rounded, with a scale for "
        "each 32 neighbours: up to twice as fast on a CPU, a little less exact",
    )
    seed: int = option(0, "seed of random weights and of requests that bring none")
    max_model_len: int | None = option(
        None, "tokens per sequence; default: what the model and the KV pool allow", least=2
    )
    tensor_parallel_size: int | None = option(
        None, "devices among which the model is cut; default: as many as `devices` names, else 1", "-tp", least=1
    )
    devices: str | None = option(None, "indices of JAX's devices, with commas, such as 0,1; default: the first ones")
    generation_config: str = option(
        "auto",
        "defaults of sampling parameters; auto: of the checkpoint's generation_config.json; vllm: of the library; or a "
        "directory that has such a file",
    )
    enable_return_routed_experts: bool = option(
        False, "steps also return the experts of every token, for requests with `return_routed_experts`"
    )

    @property
    def device_ids(self) -> tuple[int, ...] | None:
        """The indices in `devices`. Raises `ConfigError` unless these are different whole numbers."""
        if self.devices is None:
            return None
        words = [word.strip() for word in self.devices.split(",")]
        if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
            raise ConfigError("devices must be indices that differ", got=shown(self.devices), fix="such as 0 or 0,1")
        return tuple(map(int, words))


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters (LoRA) of the model; one step may use many."""

    loras: tuple[str, ...] | dict[str, Any] | None = option(
        None,
        "an adapter as PEFT saves it, as NAME=DIRECTORY: requests that name it as their model have it",
        "--lora-modules",
    )
    max_loras: int | None = option(
        None,
        "adapters that fit at a time, of any modules; what is not taken at the start can be loaded later; default: those of "
        "`loras`, with room for their modules alone",
        least=1,
    )
    max_lora_rank: int | None = option(
        None, "largest rank of an adapter; default: of `loras`, or 16 without any", least=1
    )
    tool_lora: str | None = option(None, "the adapter of chats with tools that name none")
    tool_call_bias: float | None = option(None, "added to logits that open calls, in chats of `tool_lora`")

    @property
    def directories(self) -> dict[str, str]:
        """The directories of adapters by name. Raises `ConfigError` for an entry that lacks either, and a name given twice."""
        if isinstance(self.loras, Mapping):
            pairs = [(str(name), str(place)) for name, place in self.loras.items()]
        else:
            words = [word.partition("=") for word in self.loras or ()]
            pairs = [(name.strip(), place.strip()) for name, _, place in words]
        if not all(name and place for name, place in pairs):
            raise ConfigError(
                "an adapter has a name and a directory", got=shown(self.loras), fix="NAME=DIRECTORY for each"
            )
        directories = dict(pairs)
        if len(directories) < len(pairs):
            raise ConfigError("two adapters have one name", got=shown(self.loras), fix="give each a name of its own")
        return directories

    @property
    def num_slots(self) -> int:
        # with `max_loras` there is room for any modules, else for those of `loras` alone
        return len(self.directories) if self.max_loras is None else self.max_loras

    @property
    def call_bias(self) -> float:
        """Added to the logit with which a call opens in chats of `tool_lora` that may answer."""
        return self.tool_call_bias or 0.0

    def check(self) -> None:
        num_named, num_slots = len(self.directories), self.num_slots
        if num_slots < num_named:
            got, fix = f"{num_slots} for {num_named}", f"{num_named} or more"
            raise ConfigError("max_loras is less than the number of adapters in loras", got=got, fix=fix)
        if self.max_lora_rank is not None and not num_slots:
            raise ConfigError("max_lora_rank needs adapters", got="no room for any", fix="give max_loras or loras too")
        if self.tool_lora is not None and self.tool_lora not in self.directories and num_slots == num_named:
            names = ", ".join(self.directories) or "none are named"
            raise ConfigError(
                "tool_lora must be a name in loras", got=shown(self.tool_lora), fix=f"one of loras: {names}"
            )
        if not -MAX_BIAS <= self.call_bias <= MAX_BIAS:
            fix = f"a number from -{MAX_BIAS} to {MAX_BIAS}"
            raise ConfigError("tool_call_bias is wrong", got=self.call_bias, fix=fix)


@dataclass(frozen=True)
class CacheOptions:
    """Memory for KV, on the device and on the host."""

    kv_tokens: int | None = option(
        None,
        "tokens of the device's KV pool; default: what a GPU has room for; on a CPU 1/4 of the free memory, 16384 at most",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory that JAX may take, for weights, KV pool and temporaries; unless XLA_CLIENT_MEM_FRACTION "
        "says so, or JAX runs already",
        least=0.01,
        most=1,
    )
    kv_cache_dtype: KVDTypeChoice = option(
        "auto",
        "format of KV pages, on the device and on the host; auto: the dtype; int8, fp8 (e4m3): a byte a number and a scale "
        "for each token's key and value of a head",
    )
    page_size: int = option(16, "tokens per page", "--block-size", least=1)
    swap_space: float = option(
        4.0,
        "GiB of host memory for copies of pages and states, by default at most half of what weights and KV pool leave; 0 turns "
        "the host tier off",
        least=0,
    )
    kv_disk: str | None = option(
        None,
        "folder of a disk of this machine in which contexts survive a restart; it is created, and used by one server at a time",
    )
    kv_disk_space: float | None = option(
        None, "GiB that the contexts in `kv_disk` may take; default: half of what is free there", least=0
    )
    enable_prefix_caching: bool = option(True, "keep full pages of finished requests until their slots are wanted")
    num_states: int | None = option(
        None,
        "states of recurrent layers on the device, of running and paused sequences and of prefixes, in models that have such "
        "layers; default: four times max_num_seqs, or as many as a quarter of the free memory holds",
        least=1,
    )
    num_window_tokens: int | None = option(
        None,
        "tokens of a pool of their own for layers that see a window; 0: they share that of the others; default: for contexts "
        "of 8 windows, if the longest sequence has at least 4",
        least=0,
    )


@dataclass(frozen=True)
class SchedulingOptions:
    """Options that decide which sequences run in a step, and what happens to the contexts of the others."""

    policy: str = option(
        "copy_ahead",
        "what becomes of the context of a paused request: a name of sched/policies.py, or your own as path.py:Class or "
        "package.module:Class",
    )
    estimator: str = option(
        "history", "how the duration of a call is predicted: elapsed, history, or your own as path.py:Class"
    )
    order: str = option(
        "missing_work",
        "which request is computed next: fcfs; missing_work: the one that lacks the least work, unless another has waited "
        "long for its own; or your own as path.py:Class",
    )
    overload: Literal["queue", "refuse", "serve"] = option(
        "queue",
        "what becomes of new conversations while requests wait too long, or memory has no room for more contexts: they wait at "
        "the door, which is queue; refuse: they are answered 429; serve: they are served like all others",
    )
    profile: str | None = option(
        None,
        "what steps and transfers cost: a named profile, a JSON file, `quick` or `measure` to measure at this start; "
        "default: as measured last on this machine, else quick",
    )
    max_num_seqs: int = option(
        32, "sequences that run at once; by default fewer if the KV pool or a step has no room for 32", least=1
    )
    max_num_batched_tokens: int = option(
        512,
        "query tokens of the largest step; by default more if max_num_seqs, or max_model_len of whole prompts, is larger",
    )
    max_chunk_tokens: int | None = option(
        None, "query tokens of one sequence in one step; default: no limit of its own", least=1
    )
    chunked_prefill: bool | None = option(
        None,
        "prefill in chunks beside decodes, or whole prompts first; default: as the policy was published if the largest "
        "step holds the longest sequence, else chunked",
        "--enable-chunked-prefill",
    )
    speculative_config: str | dict[str, Any] | None = option(
        None,
        "drafts of the next tokens that steps verify, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, or '
        '{"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 4}, or '
        '{"method": "mtp", "num_speculative_tokens": 1}, with "model" for an assistant of Gemma 4; default: none',
    )
    preemption: PreemptionChoice = option(
        "policy",
        "what becomes of the context of a running sequence that has to give way: the policy's choice; auto: its pages are "
        "recomputed or swapped, whichever the profile prices lower, as slots are needed; or one of these, all at once",
    )

    @property
    def speculation(self) -> SpeculativeConfig:
        """The drafts. Raises `ConfigError`."""
        return SpeculativeConfig.parse(self.speculative_config)


@dataclass(frozen=True)
class AdvancedOptions:
    """How steps are executed; the defaults suit."""

    layers_per_step: int | None = option(
        None, "layers per executable; default: 1 on a CPU, all of them on a GPU", least=1
    )
    staging_pages: StagingChoice | None = option(
        None, "most pages of a context that cross the host link as one array, a power of two; default: 16, on a CPU 1"
    )
    pinned_memory: bool = option(True, "copies of pages on the host are in page-locked memory; off: in pageable memory")
    pipeline_depth: int = option(
        1, "0: read a step's tokens before planning the next; 1: one step later", least=0, most=1
    )
    attention: AttentionChoice = option("auto", "implementation of attention")
    batch_invariant: bool = option(
        False,
        "in float32 on a CPU, log probabilities have the same bits whatever the batch, chunks, policy and pauses, and those of "
        "a plain forward of the same tokens: products of 64 rows at least, and attention=ordered",
    )
    compilation_cache: bool = option(True, "keep compiled executables on disk for the next start")
    async_dispatch: bool = option(
        True, "on a GPU, XLA starts executables from a thread of its own, so that a step costs the host a third less"
    )
    check_pages: bool = option(False, "assert after every step that no page is lost or owned twice")


@dataclass(frozen=True)
class HostOptions:
    """One model over several processes, each with devices of its own; host 0 schedules and answers."""

    coordinator: str | None = option(None, "HOST:PORT at which host 0 serves the others, there and at the next port")
    num_hosts: int | None = option(None, "processes of the model", least=1)
    host_id: int | None = option(None, "this process's number, from 0", least=0)
    host_timeout: float = option(300.0, "seconds that hosts wait for each other at the start", least=0)


class RestartOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.restart` beside `policy`, `estimator` and `order`: options that no executable depends on.

    `speculative_config` may have at most as many drafts as the `LLM` started with.
    """

    seed: int
    swap_space: float
    enable_prefix_caching: bool
    max_chunk_tokens: int | None
    chunked_prefill: bool | None
    preemption: PreemptionChoice
    overload: Literal["queue", "refuse", "serve"]
    speculative_config: str | dict[str, Any] | None
    pipeline_depth: int
    check_pages: bool


class LLMOptions(RestartOptions, total=False):
    """Keyword arguments of `LLM` beside `policy`, `estimator`, `order` and `profile`, which it also takes as objects."""

    loras: tuple[str, ...] | dict[str, Any] | None
    max_loras: int | None
    max_lora_rank: int | None
    tool_lora: str | None
    tool_call_bias: float | None
    dtype: DTypeChoice
    load_format: LoadFormatChoice
    quantization: QuantizationChoice
    activation_dtype: ActivationDTypeChoice
    max_model_len: int | None
    generation_config: str
    enable_return_routed_experts: bool
    tensor_parallel_size: int | None
    devices: str | None
    kv_tokens: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: KVDTypeChoice
    kv_disk: str | None
    kv_disk_space: float | None
    num_states: int | None
    num_window_tokens: int | None
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layers_per_step: int | None
    staging_pages: StagingChoice | None
    pinned_memory: bool
    attention: AttentionChoice
    batch_invariant: bool
    compilation_cache: bool
    async_dispatch: bool
    coordinator: str | None
    num_hosts: int | None
    host_id: int | None
    host_timeout: float


class EngineOptions(LLMOptions, total=False):
    """All options of the engine as plain values, from a command line or a TOML table."""

    policy: str
    estimator: str
    order: str
    profile: str | None


@dataclass(frozen=True)
class EngineConfig:
    """All groups of options."""

    model: ModelOptions
    adapters: AdapterOptions
    cache: CacheOptions
    scheduling: SchedulingOptions
    advanced: AdvancedOptions
    hosts: HostOptions

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Groups from flat options. Raises `ConfigError` for unknown names, wrong types and values out of range."""
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise ConfigError(
                "no such option",
                got=", ".join(name + nearest(ALIASES.get(name, name), [*OPTIONS]) for name in unknown),
                fix=f"the options are {', '.join(sorted(OPTIONS))}",
            )
        config = cls(**{name: _group(group, options) for name, group in GROUPS.items()})
        config = config._fitted(options)
        config._check()
        return config

    def _fitted(self, given: Mapping[str, Any]) -> Self:
        # Only given options may be refused: defaults change to work beside them.
        cache, scheduling = self.cache, self.scheduling
        num_seqs, num_tokens = scheduling.max_num_seqs, scheduling.max_num_batched_tokens
        if "max_num_seqs" not in given:
            most = [num_seqs, num_tokens]
            most += [] if cache.kv_tokens is None else [cache.kv_tokens // max(1, cache.page_size)]
            most += [] if cache.num_states is None else [cache.num_states]
            num_seqs = max(1, min(most))
        if "max_num_batched_tokens" not in given:
            whole = self.model.max_model_len or 0 if scheduling.chunked_prefill is False else 0
            num_tokens = max(num_tokens, num_seqs, whole)
        return replace(self, scheduling=replace(scheduling, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens))

    def _check(self) -> None:
        cache, scheduling = self.cache, self.scheduling
        for name in GROUPS:
            check_bounds(getattr(self, name))
        if cache.kv_tokens is not None and cache.kv_tokens < cache.page_size:
            raise ConfigError("kv_tokens is too small", got=cache.kv_tokens, fix=f"at least {cache.page_size}")
        if scheduling.max_num_batched_tokens < scheduling.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens must be at least max_num_seqs: every running sequence needs a token of a step",
                got=f"max_num_batched_tokens={scheduling.max_num_batched_tokens}, max_num_seqs={scheduling.max_num_seqs}",
                fix="raise the first or lower the second",
            )
        ids, size = self.model.device_ids, self.model.tensor_parallel_size
        if ids is not None and size not in (None, len(ids)):
            raise ConfigError(
                "tensor_parallel_size differs from the number of devices",
                got=f"{size} and devices={self.model.devices}",
                fix="leave one of them out",
            )
        assert scheduling.speculation
        self.adapters.check()
        self._check_disk()

    def _check_disk(self) -> None:
        cache = self.cache
        if cache.kv_disk is None:
            return
        refuse_any(
            "kv_disk cannot be combined with this option",
            (not cache.swap_space, "swap_space=0", "some swap_space: pages pass through the host's memory"),
            (not cache.enable_prefix_caching, "enable_prefix_caching=False", "prefix caching"),
            (self.scheduling.speculation.model is not None, "a draft model", "n-grams, or no drafts"),
            (self.hosts.num_hosts or self.hosts.coordinator, "several hosts", "one host"),
        )


CHOICES = ("policy", "estimator", "order")
"""Options that `LLM` also takes as classes, functions or objects."""
GROUPS: dict[str, type] = get_type_hints(EngineConfig)
"""The groups by their names in `EngineConfig`."""
OPTIONS = {f.name: f for group in GROUPS.values() for f in fields(group)}
ALIASES = {alias.strip("-").replace("-", "_"): name for name, f in OPTIONS.items() for alias in f.metadata["aliases"]}
"""Options by vLLM's names for them."""


def _group[G](group: type[G], options: Mapping[str, Any]) -> G:
    section = group(**{f.name: plain(options[f.name]) for f in fields(group) if f.name in options})  # pyright: ignore[reportArgumentType]
    for name, hint in get_type_hints(group).items():
        value = getattr(section, name)
        if name not in CHOICES:
            check_type(name, value, hint)
        elif isinstance(value, int | float | list | dict):  # what else it may be is checked where it is made
            fix = "give a name, a class as path.py:Class, or in a program the class or an object"
            raise ConfigError(f"{name} has the wrong type", got=shown(value), fix=fix)
    return section
