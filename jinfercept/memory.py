"""What an engine takes and what it can hold, settled before any of it is taken."""

import math
from contextlib import suppress
from dataclasses import dataclass

import jax
import psutil

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import Params, kv_bytes_per_token

GIB = 1 << 30
DEFAULT_KV_TOKENS = 16384
"""Most tokens of a device pool that nobody sized."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, and in tokens."""

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


def plan_memory(
    model_config: ModelConfig, params: Params, config: EngineConfig, kv_tokens: int | None = None
) -> MemoryPlan:
    """Sizes of the pools. Raises `ConfigError` if they cannot work.

    Args:
        params: the weights, which are there already.
        kv_tokens: size of a device pool that is there already.
    """
    cache = config.cache
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    first = next(iter(leaves.values()))
    token_bytes = kv_bytes_per_token(model_config, first.dtype)
    free = _free_bytes(first) + (kv_tokens or 0) * token_bytes
    asked = kv_tokens or cache.kv_tokens
    if asked is None:
        asked = min(
            DEFAULT_KV_TOKENS, config.scheduler.max_num_seqs * model_config.max_position, free // 4 // token_bytes
        )
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
    host_bytes = cache.swap_space * GIB
    if not math.isfinite(host_bytes) or host_bytes > psutil.virtual_memory().total:
        total = _gib(psutil.virtual_memory().total)
        raise ConfigError(
            "swap_space is more than the machine has", got=f"{cache.swap_space} GiB", fix=f"less than {total}"
        )
    host_tokens = int(host_bytes) // (token_bytes * cache.page_size) * cache.page_size
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
