"""Every option there is, once: the fields are the keyword arguments of `LLM` and the flags of the command line.

Sections are frozen, and every class of the engine gets only its own. Help texts are in the fields' metadata.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self, get_args, get_origin, get_type_hints

from jinfercept.errors import ConfigError, nearest


def option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with its help text and, if it is a choice, what may be chosen."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class ModelOptions:
    """What is loaded."""

    dtype: str = option(
        "auto",
        "type of weights and KV; auto: float32 on a CPU, bfloat16 on a GPU",
        ("auto", "float32", "bfloat16"),
    )
    load_format: str = option("auto", "dummy: random weights for a checkpoint's config", ("auto", "dummy"))
    seed: int = option(0, "seed of random weights and of requests that bring none")
    generation_config: str = option(
        "auto",
        "sampling defaults: auto: the checkpoint's generation_config.json; vllm: none of it; or a directory that has one",
    )
    max_model_len: int | None = option(None, "tokens per sequence; default: what the model and the KV pool allow")


@dataclass(frozen=True)
class CacheOptions:
    """Where KV lives."""

    kv_tokens: int | None = option(
        None,
        "tokens of the device's KV pool; default: what a GPU has room for; on a CPU 1/4 of the free memory, 16384 at most",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory that JAX may take, for weights, KV pool and temporaries; unless XLA_CLIENT_MEM_FRACTION "
        "says so, or JAX runs already",
    )
    page_size: int = option(16, "tokens per page")
    swap_space: float = option(4.0, "GiB of host memory for copies of pages; 0 turns the host tier off")
    enable_prefix_caching: bool = option(True, "keep full pages of finished requests until their slots are wanted")


@dataclass(frozen=True)
class SchedulerOptions:
    """Who runs."""

    policy: str = option(
        "copy_ahead", "what becomes of the context of a paused request; sched/policies.py has the names"
    )
    estimator: str = option("history", "how the duration of a call is predicted", ("elapsed", "history"))
    profile: str | None = option(
        None,
        "what steps and transfers cost: a named profile, a JSON file, `quick` or `measure` to measure at this start; "
        "default: as measured last on this machine, else quick",
    )
    max_num_seqs: int = option(32, "sequences that run at once")
    max_num_batched_tokens: int = option(512, "query tokens of the largest step")
    max_chunk_tokens: int | None = option(
        None, "query tokens of one sequence in one step; default: no limit of its own"
    )
    chunked_prefill: bool | None = option(
        None,
        "prefill in chunks beside decodes, or whole prompts first; default: as the policy was published if the largest "
        "step holds the longest sequence, else chunked",
    )
    preemption: str = option(
        "auto",
        "what becomes of the context of a running sequence that has to give way: the policy's choice, or forced",
        ("auto", "recompute", "swap"),
    )


@dataclass(frozen=True)
class RunnerOptions:
    """How steps are executed."""

    layers_per_step: int | None = option(
        None, "layers per executable; default: as chosen by `jinfercept profile`, else 1 on a CPU, 4 on a GPU"
    )
    transfer_parts: int = option(
        1, "pieces in which a page crosses the host link, each beside the compute of its own layers; 1: whole"
    )
    pipeline_depth: int = option(1, "0: read a step's tokens before planning the next; 1: one step later")
    attention: str = option("auto", "implementation of attention", ("auto", "triton", "mosaic", "cpu", "reference"))
    compilation_cache: bool = option(True, "keep compiled executables on disk for the next start")
    check_pages: bool = option(False, "assert after every step that no page is lost or owned twice")


SECTIONS = (ModelOptions, CacheOptions, SchedulerOptions, RunnerOptions)


@dataclass(frozen=True)
class EngineConfig:
    """All sections."""

    model: ModelOptions
    cache: CacheOptions
    scheduler: SchedulerOptions
    runner: RunnerOptions

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Sections from flat options. Raises `ConfigError` for unknown names and values out of range."""
        known = {name.name for section in SECTIONS for name in fields(section)}
        unknown = sorted(set(flags) - known)
        if unknown:
            raise ConfigError(
                "no such option",
                got=", ".join(name + nearest(name, list(known)) for name in unknown),
                fix=f"the options are {', '.join(sorted(known))}",
            )
        config = cls(
            _section(ModelOptions, flags),
            _section(CacheOptions, flags),
            _section(SchedulerOptions, flags),
            _section(RunnerOptions, flags),
        )
        config._check()
        return config

    def _check(self) -> None:
        cache, scheduler, runner = self.cache, self.scheduler, self.runner
        for name, value, least in (
            ("page_size", cache.page_size, 1),
            ("kv_tokens", cache.kv_tokens, cache.page_size),
            ("swap_space", cache.swap_space, 0),
            ("max_model_len", self.model.max_model_len, 2),
            ("max_num_seqs", scheduler.max_num_seqs, 1),
            ("max_chunk_tokens", scheduler.max_chunk_tokens, 1),
            ("layers_per_step", runner.layers_per_step, 1),
            ("transfer_parts", runner.transfer_parts, 1),
        ):
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is too small", got=value, fix=f"at least {least}")
        if not 0 < cache.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization is a share", got=cache.gpu_memory_utilization, fix="more than 0, at most 1"
            )
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                "a step has to hold a token of every running sequence",
                got=f"max_num_batched_tokens={scheduler.max_num_batched_tokens}, max_num_seqs={scheduler.max_num_seqs}",
                fix="raise the first or lower the second",
            )
        if runner.pipeline_depth not in (0, 1):
            raise ConfigError("pipeline_depth is 0 or 1", got=runner.pipeline_depth, fix="choose one of them")


def flag_fields() -> list[tuple[Field[Any], type]]:
    """Every option with its type (without None), in order."""
    return [field for section in SECTIONS for field in section_fields(section)]


def section_fields(section: type) -> list[tuple[Field[Any], type]]:
    """The options of one section with their types (without None; a tuple is `tuple`), in order."""
    return [(f, _plain_type(section, f.name)) for f in fields(section)]


def _plain_type(section: type, name: str) -> type:
    hint = get_type_hints(section)[name]
    if get_origin(hint) is tuple:
        return tuple
    return next((arg for arg in get_args(hint) if arg is not type(None)), hint)


def _section[S](section: type[S], flags: Mapping[str, Any]) -> S:
    """One section of the flat options, its types and choices checked."""
    options = section(**{f.name: flags[f.name] for f in fields(section) if f.name in flags})  # pyright: ignore[reportArgumentType]
    _check_types(options)
    return options


def _check_types(section: Any) -> None:
    for f in fields(section):
        value, wanted, choices = getattr(section, f.name), _plain_type(type(section), f.name), f.metadata["choices"]
        if value is None and f.default is None:
            continue
        fits = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
        if not fits or (wanted is not bool and isinstance(value, bool)):
            raise ConfigError(
                f"{f.name} has the wrong type", got=repr(value), fix=f"give a value of type {wanted.__name__}"
            )
        if choices and value not in choices:
            raise ConfigError(f"{f.name} is one of {', '.join(choices)}", got=repr(value), fix="choose one of them")
