"""Sizes and costs that a start settles: layers per executable, pages of the pools, and the profile of steps and transfers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax

from jinfercept.config import EngineConfig
from jinfercept.cpu_kernels.machine import num_processors
from jinfercept.cpu_kernels.ordered_attention import fewest_rows
from jinfercept.errors import ConfigError
from jinfercept.models.adapters import adapter_matrices
from jinfercept.models.embedded import cache_directory
from jinfercept.models.load import Loaded
from jinfercept.models.mesh import ModelMesh, mesh_of
from jinfercept.models.model import Model
from jinfercept.models.protocol import Params, ServedModel, num_draft_layers, states_of
from jinfercept.models.quantized import is_quantized, weights_of
from jinfercept.pallas.layouts.interleaved import INTERLEAVED_ON
from jinfercept.pallas.layouts.kv_rows import BYTES
from jinfercept.pallas.tpu_kernels import tables_fit
from jinfercept.runner.draft_layer import as_assistant
from jinfercept.runner.shape import RunnerShape
from jinfercept.runner.steps import step_bytes
from jinfercept.sched.profile import Profile
from jinfercept.start.memory import (
    FreeMemory,
    MemoryPlan,
    largest_product_bytes,
    plan_memory,
    token_kv_bytes,
    windows_pay,
)
from jinfercept.start.profiler import EFFORTS, StepRunner, measure, profile_path, remember, remembered
from jinfercept.start.side_pools import NO_WINDOW_PLAN, plan_states, plan_windows

STAGING_PAGES = 16
"""Most pages of an array that crosses a link, unless the user says otherwise: a full link costs the host few arrays a step."""

MEASUREMENT = 3
"""Version of what a profile measures and how: those of another one are not remembered."""


def layers_per_step(model: ServedModel, config: EngineConfig) -> int:
    """Layers of an executable: the user's number, or one on a CPU and all elsewhere."""
    # a CPU compiles one layer fast; a GPU launches one executable as one graph
    default = 1 if jax.default_backend() == "cpu" else model.config.num_layers
    return min(config.advanced.layers_per_step or default, model.config.num_layers)


def plan_pools(
    model: ServedModel, params: Params, config: EngineConfig, draft: Loaded[ServedModel] | None = None
) -> tuple[MemoryPlan, RunnerShape]:
    """Sizes of the pools, and of what is compiled. Raises `ConfigError` if they cannot work. Waits for the weights."""
    for served in (model, *(() if draft is None else (draft.model,))):
        _check_rows(served, config.cache.kv_cache_dtype)
    jax.block_until_ready((params, None if draft is None else draft.params))
    room, routed_experts = FreeMemory.on(*_mesh(params).local_devices), _routed_experts(model, config)
    windows = plan_windows(model, config, config.model.max_model_len or model.config.max_position)
    beside = timed = 0
    if not room.shared:
        # The steps of a device with memory of its own are compiled first, for a pool of one page, to learn what they take
        # beside it.
        longest = config.model.max_model_len or model.config.max_position
        shape, attention = _runner_shape(model, 1, longest, config), config.advanced.attention
        shape = replace(shape, num_states=int(bool(states_of(model))), routed_experts=routed_experts)
        shape = replace(shape, num_window_pages=min(1, windows.num_layers))
        assistant = as_assistant(draft)
        beside = step_bytes(model, params, shape, attention, assistant)
        timed = largest_product_bytes(params, shape.buckets[-1], shape.sample_rows[-1])
        if draft is not None and assistant is None:
            beside += step_bytes(draft.model, draft.params, draft_shape(draft.model, model, shape), attention)
    mesh, dtype = _mesh(params), str(weights_of(params)[0].dtype)
    states = plan_states(model, dtype, mesh.size, config, room.free_bytes)
    room = room._replace(free_bytes=room.free_bytes - states.num_bytes)

    def planned() -> MemoryPlan:
        plan = partial(plan_memory, model.config, params, config, room, beside, timed, draft, states=states)
        memory = plan(windows=windows)
        if config.cache.num_window_tokens is None and not windows_pay(memory, config.cache.page_size):
            return plan()
        # what the KV pool holds may be shorter than some windows
        shorter = plan_windows(model, config, memory.max_model_len)
        return plan(windows=shorter) if shorter.num_layers < windows.num_layers else memory

    memory = planned()
    num_pages = memory.kv_tokens // config.cache.page_size
    shape = _runner_shape(model, num_pages, memory.max_model_len, config)
    shape = replace(shape, num_states=states.num_states, num_window_pages=memory.windows.num_slots)
    moved_pages = max(1, memory.moved_tokens // config.cache.page_size)
    return memory, replace(shape, moved_pages=moved_pages, routed_experts=routed_experts)


def _routed_experts(model: ServedModel, config: EngineConfig) -> int:
    if not config.model.enable_return_routed_experts:
        return 0
    experts = model.config.experts if isinstance(model, Model) else None
    if experts is None:
        got, fix = model.config.family, "leave enable_return_routed_experts out, or use a model with experts"
        raise ConfigError("the model has no experts whose choice could be returned", got=got, fix=fix)
    return experts.per_token


def draft_shape(draft: ServedModel, served: ServedModel, shape: RunnerShape) -> RunnerShape:
    layers = min(shape.layers_per_step, draft.config.num_layers)
    none = {"num_drafts": 0, "num_adapters": 0, "routed_experts": 0, "num_window_pages": 0, "num_states": 0}
    return replace(shape, layers_per_step=layers, drafts_for=served.config.vocab_size, **none)


def profile_settings(
    model: ServedModel,
    params: Params,
    shape: RunnerShape,
    config: EngineConfig,
    draft: Loaded[ServedModel] | None = None,
) -> Mapping[str, str | int]:
    """Everything that the cost of a step depends on."""
    devices = _mesh(params).devices
    device, weights = devices[0].device_kind, weights_of(params)
    quantised = _formats(params)
    return {
        "model": repr(model.config),
        "dtype": str(weights[0].dtype),
        **({"weights": quantised} if quantised else {}),
        **({"adapters": _adapters(params)} if shape.num_adapters else {}),
        **({} if draft is None else {"draft": f"{draft.model.config} {_formats(draft.params)}"}),
        **({"drafts": shape.num_drafts} if shape.is_assisted or num_draft_layers(model.config) else {}),
        "buckets": repr(shape.buckets),
        "max_num_seqs": shape.max_num_seqs,
        "page_size": shape.page_size,
        "layers_per_step": shape.layers_per_step,
        "staging_pages": shape.staging_pages,
        **({} if shape.kv_cache_dtype == "auto" else {"kv_cache_dtype": shape.kv_cache_dtype}),
        **({} if shape.pinned_memory else {"pinned_memory": False}),
        **({"windows": "in a pool of their own"} if shape.num_window_pages else {}),
        "attention": config.advanced.attention,
        "device": device if len(devices) == 1 else f"{len(devices)} x {device}",
        "processors": num_processors(),
        "jax": jax.__version__,
        "measurement": MEASUREMENT,
    }


def _formats(params: Params) -> str:
    quantised = [weight for weight in weights_of(params) if is_quantized(weight)]
    return ", ".join(sorted({f"{weight.packing}{' of int8 rows' * weight.int8_rows}" for weight in quantised}))


def _adapters(params: Params) -> str:
    return ", ".join(f"{name} {weight.a.shape}" for name, weight in adapter_matrices(params)[0].items())


def remembered_profile(
    model: ServedModel,
    params: Params,
    shape: RunnerShape,
    config: EngineConfig,
    draft: Loaded[ServedModel] | None = None,
) -> Profile | None:
    """The profile that was measured last with the same settings; None if there is none."""
    return remembered(profile_path(cache_directory(), profile_settings(model, params, shape, config, draft)))


def measured_profile(
    model: ServedModel,
    params: Params,
    draft: Loaded[ServedModel] | None,
    runner: StepRunner,
    drafter: StepRunner | None,
    shape: RunnerShape,
    config: EngineConfig,
    effort: str,
    progress: Callable[[str, int, int], None],
) -> Profile:
    """The profile of steps and transfers, measured now and remembered."""
    settings = profile_settings(model, params, shape, config, draft)
    windows = plan_windows(model, config, shape.max_model_len) if shape.num_window_pages else NO_WINDOW_PLAN
    profile = measure(
        runner,
        shape,
        name=f"{model.config.family} of {model.config.num_layers} layers on {settings['device']}",
        kv_bytes_per_token=token_kv_bytes(model.config, params, config.cache, draft, windows),
        effort=EFFORTS[effort],
        settings=settings,
        drafter=drafter,
        has_draft_layer=shape.is_assisted or num_draft_layers(model.config) > 0,
        asynchronous=jax.default_backend() != "cpu",
        progress=progress,
    )
    with suppress(OSError):  # a cache that cannot be written costs the next start a moment
        remember(profile.save, profile_path(cache_directory(), settings))
    return profile


def buckets(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> tuple[int, ...]:
    """Query tokens of the executables, ascending: few sizes for chunks, more where a step may be decodes only.

    A step is computed at the next larger size. Between sizes for chunks, four times apart, that would take up to twice as long
    for many decode rows, which no longer chunk can fill up. A CPU, whose time grows with the size, has one more.
    """
    least = 8 if platform == "gpu" else 1  # a GPU's matrix kernels multiply eight rows at least
    decodes = {size for size, smaller in ((64, 32), (256, 128), (384, 256)) if smaller < max_num_seqs}
    between = {256} if platform == "cpu" else set[int]()
    sizes = sorted({1, 8, 32, 128, 512, 2048, 8192} | decodes | between)
    return (*(size for size in sizes if least <= size < max_num_batched_tokens), max_num_batched_tokens)


def _check_rows(model: ServedModel, kv_cache_dtype: str) -> None:
    if kv_cache_dtype == "int8" and jax.default_backend() in INTERLEAVED_ON:
        raise ConfigError("a TPU's quantised pages are in fp8", got=kv_cache_dtype, fix="kv_cache_dtype fp8, or auto")
    if kv_cache_dtype != "auto" and model.config.head_dim % BYTES:
        got, fix = f"{kv_cache_dtype} and head dim {model.config.head_dim}", "kv_cache_dtype auto"
        raise ConfigError(f"quantised pages need head dims that are multiples of {BYTES}", got=got, fix=fix)


def check_tables(max_num_seqs: int, max_model_len: int, page_size: int) -> None:
    """Raise `ConfigError` if a step's page tables do not fit where a TPU's attention reads them."""
    if tables_fit(max_num_seqs, -(-max_model_len // page_size) + 1):
        return
    sizes = (1 << power for power in range(page_size.bit_length(), 20))
    fitting = next(size for size in sizes if tables_fit(max_num_seqs, -(-max_model_len // size) + 1))
    raise ConfigError(
        "the page tables do not fit into a TPU's scalar memory",
        got=f"max_num_seqs={max_num_seqs} of {max_model_len} tokens in pages of {page_size}",
        fix=f"page_size={fitting}, or lower max_num_seqs or max_model_len",
    )


def staging_pages(config: EngineConfig, platform: str) -> int:
    """Most pages of an array on the host: on a CPU, where nothing crosses a link, each page is its own."""
    return config.advanced.staging_pages or (1 if platform == "cpu" else STAGING_PAGES)


def _runner_shape(model: ServedModel, num_pages: int, max_model_len: int, config: EngineConfig) -> RunnerShape:
    platform = jax.default_backend()
    fewest, sizes = 1, buckets(config.scheduling.max_num_seqs, config.scheduling.max_num_batched_tokens, platform)
    if config.advanced.batch_invariant:
        fewest = fewest_rows(model.config.hidden_size)
        sizes = (fewest, *(size for size in sizes if size > fewest))
    if platform in INTERLEAVED_ON:
        check_tables(config.scheduling.max_num_seqs, max_model_len, config.cache.page_size)
    drafts = config.scheduling.speculation
    return RunnerShape(
        num_pages=num_pages,
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduling.max_num_seqs,
        max_model_len=max_model_len,
        buckets=sizes,
        layers_per_step=layers_per_step(model, config),
        staging_pages=staging_pages(config, platform),
        pinned_memory=config.advanced.pinned_memory,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        num_drafts=drafts.num_speculative_tokens,
        is_assisted=drafts.method == "mtp" and drafts.model is not None,
        num_adapters=config.adapters.num_slots,
        fewest_rows=fewest,
    )


def _mesh(params: Params) -> ModelMesh:
    return mesh_of(jax.tree.leaves(params.embed)[0])
