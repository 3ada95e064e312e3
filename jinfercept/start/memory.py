"""The memory plan: bytes and tokens of weights, KV pool and host pool, settled before pages are allocated.

A device with memory of its own gives the pages all that JAX may take there (`gpu_memory_utilization`), less the weights, the
steps' temporaries and pages on their way over the link. A CPU's memory is shared with other processes: pages get a part of it.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax

from jinfercept.config import AdvancedOptions, CacheOptions, EngineConfig
from jinfercept.cpu_kernels.machine import memory
from jinfercept.errors import ConfigError
from jinfercept.kv.side_pool import NO_SIDES, SideSizes
from jinfercept.models.load import Loaded
from jinfercept.models.mesh import beside, local_bytes, mesh_of
from jinfercept.models.protocol import ModelDimensions, Params, ServedModel, num_kv_layers
from jinfercept.models.quantized import weights_of
from jinfercept.pallas.layouts.kv_rows import stored_dtype
from jinfercept.runner.page_transfers import layer_pages
from jinfercept.start.side_pools import NO_STATES, NO_WINDOW_PLAN, StatePlan, WindowPlan, are_long

GIB = 1 << 30
DEFAULT_KV_TOKENS = 16384
"""Most tokens of a pool in a CPU's memory where `kv_tokens` is not given, unless the model reads longer sequences."""
HOST_MARGIN = GIB // 4
"""Bytes of the host's memory that weights, pools and copies leave to steps, compilations and the program."""
HOST_SHARE = 2
"""One in so many bytes that these leave goes to copies of pages, unless the user says otherwise."""
MOVED_BYTES = 1 << 30
"""Most that one step moves over the host link, both ways together: 20 ms at 50 GB/s."""
PREALLOCATE, GROWING = "XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "False", "0")
"""Variable of JAX, and its values with which a GPU's memory is taken in regions as it is needed, not in one region at once."""
UNSPLIT_BYTES = 1 << 27
"""A GPU's array takes the whole of a free piece of memory of which it would leave less."""
PINNED_LIMIT, PINNED_MARGIN_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 4
"""Variable of JAX, and pinned memory beside the host copies: what two steps move, and JAX's own uploads."""
STEPS_UNDER_WAY = 2
"""Steps whose pages are in transfer at once: the one that computes, and the next one, dispatched meanwhile."""


class FreeMemory(NamedTuple):
    """Bytes that are free on each device; `shared` with everything else on the machine, or the device's own."""

    free_bytes: int
    shared: bool

    @classmethod
    def on(cls, *devices: Any) -> Self:
        """The free memory of the fullest device now. Wait for dispatched computations before: statistics do not have them."""
        with suppress(Exception):  # not every backend keeps statistics
            free = list[int]()
            for device in devices:
                stats = device.memory_stats() or {}
                # one region, which is smaller than the limit where another process has some of the memory
                region = 0 if os.environ.get(PREALLOCATE) in GROWING else stats.get("pool_bytes", 0)
                free.append((region or stats["bytes_limit"]) - stats["bytes_in_use"])
            return cls(min(free), shared=False)
        return cls(max(0, memory().available - HOST_MARGIN) // len(devices), shared=True)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, and in tokens. Bytes are those of each device, but for the host's."""

    weight_bytes: int
    kv_bytes: int
    reserved_bytes: int  # kept free where a device has its own memory: for steps' temporaries and pages on their way
    host_bytes: int  # of the copies of the pages and the states of this host's devices
    kv_tokens: int
    host_tokens: int
    max_model_len: int
    moved_tokens: int  # most that one step moves over the host links, of which every device has one
    # Operands and result of the largest product, which a GPU's compiler makes to time kernels before the pages are
    # allocated; 0 where pages and everything else share the memory.
    timed_bytes: int = 0
    model_len: int = 0  # the model's longest sequence, if it is longer than the pool; else 0
    num_devices: int = 1  # among which weights and pages are cut
    num_local_devices: int = 1  # of these, the ones of this host
    states: StatePlan = NO_STATES
    windows: SideSizes = NO_SIDES  # of layers with a pool of their own; `kv_bytes` and tokens are those of the others
    window_bytes: int = 0  # of that pool
    window_plan: WindowPlan = NO_WINDOW_PLAN  # how it was sized
    is_shared: bool = False  # the pools are in the host's memory
    pinned_gib: float = math.inf  # of copies for which JAX has pinned memory; infinite where copies are pageable

    def __str__(self) -> str:
        reserved = f", {_gib(self.reserved_bytes)} kept free" if self.reserved_bytes else ""
        recurrent, host = "", ""  # states of recurrent layers, and their copies
        if self.states.num_states:
            recurrent = f", {self.states.num_states} states of recurrent layers {_gib(self.states.num_bytes)}"
            host = f" and {self.states.num_host_states:,} states" if self.host_bytes else ""
        shorter = f" (the model's {self.model_len:,} need a larger KV pool: kv_tokens)" if self.model_len else ""
        where = f"on each of {self.num_devices} devices " if self.num_devices > 1 else ""
        return (
            f"memory plan: {where}weights {_gib(self.weight_bytes)}, KV pool {_gib(self.kv_bytes)} for "
            f"{self.kv_tokens:,} tokens{self._windows()}{recurrent}"
            f"{reserved}, host copies up to {_gib(self.host_bytes)} for {self.host_tokens:,} tokens{host}; "
            f"sequences of up to {self.max_model_len:,} tokens{shorter}"
        )

    @contextmanager
    def placed(self) -> Iterator[None]:
        """If a device finds no place for an array, raise a `ConfigError` with the plan in it."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            fix = f"lower kv_tokens or gpu_memory_utilization, end other programs on the device, or leave {PREALLOCATE} out"
            raise ConfigError("the device finds no place for what was planned", got=str(self), fix=fix) from error

    def limited(self, page_size: int, *, kv_tokens: int, max_model_len: int) -> Self:
        """The plan with a KV pool and sequences that are at most as large."""
        token_bytes = self.kv_bytes // (self.kv_tokens + page_size)
        kv_bytes = (kv_tokens + page_size) * token_bytes
        return replace(self, kv_tokens=kv_tokens, kv_bytes=kv_bytes, max_model_len=max_model_len)

    def _windows(self) -> str:
        if not self.window_bytes:
            return ""
        of_windows, plan = f"{self.windows.num_slots:,} pages", self.window_plan
        return f", {plan.num_layers} layers with windows of up to {plan.window:,} {_gib(self.window_bytes)} for {of_windows}"

    def state_size(self, page_size: int) -> int:
        """Memory of one sequence's states of recurrent layers, in tokens of keys and values."""
        return math.ceil(self.num_devices * self.states.slot_bytes / self.token_bytes(page_size))

    def state_sizes(self, page_size: int) -> SideSizes:
        return SideSizes(self.states.num_states, self.states.num_host_states, self.state_size(page_size))

    def token_bytes(self, page_size: int) -> int:
        """Bytes of one token's keys and values on all devices together. One page of the pools is scratch."""
        return self.num_devices * self.kv_bytes // (self.kv_tokens + page_size)

    def with_host(self, cache: CacheOptions) -> Self:
        """The plan with a host tier of another size. Raises `ConfigError` if the machine has less, or has pinned less."""
        if cache.swap_space * GIB > (total := memory().total):
            raise ConfigError(
                "swap_space is more than the machine has", got=f"{cache.swap_space} GiB", fix=f"less than {_gib(total)}"
            )
        if cache.swap_space > self.pinned_gib:
            raise ConfigError(
                "the host has no pinned memory for swap_space",
                got=f"{cache.swap_space} GiB, room for {self.pinned_gib} GiB since JAX started",
                fix=f"lower swap_space: half-empty arrays take up to twice as much, and {PINNED_MARGIN_GIB} GiB more; "
                f"or set staging_pages=1, pinned_memory=False, or {PINNED_LIMIT}",
            )
        return self.divided(cache)

    def divided(self, cache: CacheOptions) -> Self:
        """The plan with the host tier's bytes, at most all of the host's, divided between pages and states."""
        page_size, num_devices = cache.page_size, self.num_local_devices
        token_bytes = num_devices * self.kv_bytes // (self.kv_tokens + page_size)
        token_bytes += math.ceil(self.window_plan.share * self.windows.slot_cost / page_size * token_bytes)
        host_bytes, page_bytes = int(min(cache.swap_space * GIB, memory().total)), token_bytes * page_size
        states = self.states.with_host(host_bytes, page_bytes, num_devices)
        of_states = states.num_host_states * num_devices * states.slot_bytes
        has_pages = states.num_host_states or not states.num_states  # a context needs its state beside its pages
        num_tokens = (host_bytes - of_states) // page_bytes * page_size if has_pages else 0
        windows = self.windows._replace(num_host_slots=int(self.window_plan.share * num_tokens) // page_size)
        sizes = {"host_tokens": num_tokens, "host_bytes": num_tokens * token_bytes + of_states}
        return replace(self, windows=windows, states=states, **sizes)


def arrays_per_copy(advanced: AdvancedOptions) -> int:
    """How many times the bytes of pages their copies on a GPU's host take at most, see `Pool`."""
    return 1 if advanced.staging_pages == 1 else 2


def check_weights(weight_bytes: int, room: FreeMemory) -> None:
    """Raise `ConfigError` if weights that are to be loaded do not fit."""
    if weight_bytes > room.free_bytes:
        raise ConfigError(
            "the weights do not fit",
            got=f"{_gib(weight_bytes)}, {_gib(room.free_bytes)} free",
            fix="use a smaller model or dtype" + ("" if room.shared else ", or raise gpu_memory_utilization"),
        )


def plan_memory(
    model_config: ModelDimensions,
    params: Params,
    config: EngineConfig,
    room: FreeMemory,
    step_bytes: int = 0,
    timed_bytes: int = 0,
    draft: Loaded[ServedModel] | None = None,
    windows: WindowPlan = NO_WINDOW_PLAN,
    states: StatePlan = NO_STATES,
) -> MemoryPlan:
    """Sizes of the pools. Raises `ConfigError` if they cannot work.

    Args:
        params: the weights, which are there already.
        room: what is free beside them and the states, on each of their devices.
        step_bytes: most that a step takes beside weights and pages.
        timed_bytes: see `largest_product_bytes`.
        draft: the draft model, whose KV are in pages of their own.
    """
    cache, page_size = config.cache, config.cache.page_size
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves((params, None if draft is None else draft.params))}
    leaf = weights_of(params)[0]
    mesh = mesh_of(leaf)
    num_devices, num_local_devices = mesh.size, len(mesh.local_devices)
    token_bytes = token_kv_bytes(model_config, params, cache, draft, windows) // num_devices
    window_bytes = windowed_kv_bytes(model_config, params, cache, windows) // num_devices
    moved = STEPS_UNDER_WAY * MOVED_BYTES if cache.swap_space else 0
    reserved = 0 if room.shared else max(UNSPLIT_BYTES, step_bytes + moved)
    # a page of the pool for windows is scratch, and its tokens are rounded up to another
    free_bytes = room.free_bytes - reserved - 2 * page_size * window_bytes
    fixed = windows.of(0, page_size) * window_bytes
    if windows.num_tokens and fixed > free_bytes:
        raise ConfigError(
            "the pool of layers with a window does not fit",
            got=f"num_window_tokens={windows.num_tokens} of {window_bytes} bytes each, {_gib(max(0, free_bytes))} free",
            fix="lower num_window_tokens",
        )
    share = 0.0 if windows.num_tokens else windows.share
    fitting = min((free_bytes - fixed) // token_bytes, int(free_bytes / (token_bytes + share * window_bytes)))
    fitting -= page_size  # a page is scratch
    wanted_tokens = cache.kv_tokens
    if wanted_tokens is None and room.shared:
        longest = (
            model_config.max_position
        )  # the pool holds at least one such sequence, if a quarter of the memory does
        wanted_tokens = min(max(DEFAULT_KV_TOKENS, longest), config.scheduling.max_num_seqs * longest, fitting // 4)
        least = max(config.scheduling.max_num_seqs * page_size, config.model.max_model_len or 0)
        wanted_tokens = max(wanted_tokens, min(math.ceil(least / page_size) * page_size, fitting))
    elif wanted_tokens is None:
        wanted_tokens = fitting
    kv_tokens = wanted_tokens // page_size * page_size
    if kv_tokens > fitting:
        most = max(0, fitting // page_size * page_size)
        raise ConfigError(
            "the KV pool does not fit",
            got=f"{kv_tokens} tokens of {token_bytes} bytes, {_gib(room.free_bytes)} free, {_gib(reserved)} kept free",
            fix=f"set kv_tokens to at most {most}, or use a smaller model or dtype",
        )
    if kv_tokens < config.scheduling.max_num_seqs * page_size:
        raise ConfigError(
            "the KV pool does not hold a page for every sequence",
            got=f"{max(0, kv_tokens // page_size)} pages of {page_size} tokens, {config.scheduling.max_num_seqs} sequences",
            fix="lower max_num_seqs or page_size, raise kv_tokens, or use a smaller model or dtype",
        )
    limit = default_len = min(model_config.max_position, kv_tokens)
    if config.scheduling.chunked_prefill is False:
        default_len = min(limit, config.scheduling.max_num_batched_tokens)
    max_model_len = config.model.max_model_len
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(
            "max_model_len is more than can be served",
            got=max_model_len,
            fix=f"at most {limit}: the model's {model_config.max_position} and the {kv_tokens} tokens of the KV pool",
        )
    window_tokens = windows.of(kv_tokens, page_size)
    pinned, per_copy = int(os.environ.get(PINNED_LIMIT, "64")) - PINNED_MARGIN_GIB, arrays_per_copy(config.advanced)
    plan = MemoryPlan(
        weight_bytes=sum(map(local_bytes, leaves.values())),
        kv_bytes=(kv_tokens + page_size) * token_bytes,
        reserved_bytes=reserved,
        host_bytes=0,
        kv_tokens=kv_tokens,
        host_tokens=0,
        max_model_len=max_model_len or default_len,
        model_len=model_config.max_position if max_model_len is None and kv_tokens < model_config.max_position else 0,
        moved_tokens=MOVED_BYTES // token_bytes,
        timed_bytes=0 if room.shared else timed_bytes,
        num_devices=num_devices,
        num_local_devices=num_local_devices,
        states=states,
        windows=windows.sizes(window_tokens, page_size, window_bytes / token_bytes) if window_tokens else NO_SIDES,
        window_bytes=(window_tokens + page_size) * window_bytes,
        window_plan=windows,
        is_shared=room.shared,
        pinned_gib=math.inf if room.shared or not config.advanced.pinned_memory else max(0, pinned) / per_copy,
    )
    return plan.divided(cache)


def largest_product_bytes(params: Params, num_rows: int, num_sampled: int) -> int:
    """Most bytes that operands and result of a product with a weight take on a device, results in float32.

    A step has at most `num_rows` rows, of which the head multiplies `num_sampled`.
    """

    def product(weight: Any, rows: int) -> int:
        shape = weight.shape
        widths = [math.prod(shape[:split]) + math.prod(shape[split:]) for split in range(1, len(shape))]
        return sum(map(local_bytes, jax.tree.leaves(weight))) + 4 * rows * max(widths, default=0)

    layers = weights_of(params.layers)
    return max(
        [product(weight, num_rows) for weight in layers]
        + [product(weight, num_sampled) for weight in weights_of(params.head)]
    )


def most_at_once(plan: MemoryPlan, room: FreeMemory) -> int | None:
    """Executables that can be compiled at the same time, each with the largest product's operands; None: any number."""
    return max(1, room.free_bytes // plan.timed_bytes) if plan.timed_bytes else None


def token_kv_bytes(
    model_config: ModelDimensions,
    params: Params,
    cache: CacheOptions,
    draft: Loaded[ServedModel] | None = None,
    windows: WindowPlan = NO_WINDOW_PLAN,
) -> int:
    """Bytes of one token's keys and values over all devices and the layers that share a pool, with those of a draft model."""
    num_layers = num_kv_layers(model_config) - windows.num_layers
    num_bytes = num_layers * _layer_kv_bytes(model_config, params, cache)
    return num_bytes if draft is None else num_bytes + token_kv_bytes(draft.model.config, draft.params, cache)


def windows_pay(plan: MemoryPlan, page_size: int) -> bool:
    """Whether layers with windows take less memory in a pool of their own, now that the longest sequence is known."""
    windows = plan.windows
    pays = are_long([windows.window], plan.max_model_len) and windows.num_slots * page_size < plan.kv_tokens
    return pays or plan.window_plan.sizes_config is not None


def windowed_kv_bytes(model_config: ModelDimensions, params: Params, cache: CacheOptions, windows: WindowPlan) -> int:
    """Bytes of one token's keys and values over all devices and the layers with a pool of their own."""
    return windows.num_layers * _layer_kv_bytes(windows.sizes_config or model_config, params, cache)


def _layer_kv_bytes(model_config: ModelDimensions, params: Params, cache: CacheOptions) -> int:
    leaf = weights_of(params)[0]
    dtype = stored_dtype(cache.kv_cache_dtype, leaf.dtype)
    page = layer_pages(1, 1, model_config.num_kv_heads, model_config.head_dim, dtype, beside(leaf))
    return page.size * page.dtype.itemsize


def fit_host(plan: MemoryPlan, cache: CacheOptions, *, is_given: bool) -> CacheOptions:
    """The options with host copies for which the host has memory beside the planned pools.

    A `swap_space` that the user has given does not shrink: if it does not fit, it is refused with `ConfigError`.
    """
    if plan.pinned_gib < math.inf:  # it was free when JAX started, and is no longer
        return cache if is_given else replace(cache, swap_space=min(cache.swap_space, plan.pinned_gib))
    pools = plan.kv_bytes + plan.window_bytes + plan.states.num_bytes if plan.is_shared else 0
    free_bytes = max(0, memory().available - HOST_MARGIN - plan.num_local_devices * pools)
    if not is_given:
        return replace(cache, swap_space=min(cache.swap_space, free_bytes / HOST_SHARE / GIB))
    if cache.swap_space * GIB > free_bytes:
        raise ConfigError(
            "the host has no memory for swap_space",
            got=f"{cache.swap_space} GiB, {_gib(free_bytes)} free beside the weights and the KV pool",
            fix="lower swap_space or kv_tokens, leave swap_space out, or raise the container's memory limit if it has one",
        )
    return cache


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
