"""The disk tier of an engine: its store, the identity of the KV in it, and its costs."""

import hashlib
import logging
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jinfercept.config import CacheOptions, EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.kv.disk import DiskStore
from jinfercept.models.adapted import without_adapters
from jinfercept.models.protocol import ModelDimensions, Params
from jinfercept.sched.profile import Profile

log = logging.getLogger("jinfercept")

_GIB = 1 << 30
_FORMAT = 1
"""Of a page's bytes. Pages of other formats are missing."""


class DiskTier(NamedTuple):
    """A store, and the digest of all that KV depends on beside the tokens, their isolation and the page size."""

    store: DiskStore
    identity: bytes


def open_store(cache: CacheOptions) -> DiskStore | None:
    """The store that the options ask for. Raises `ConfigError` if its folder cannot be used."""
    if cache.kv_disk is None:
        if cache.kv_disk_space is not None:
            raise ConfigError("kv_disk_space needs kv_disk", got="no kv_disk", fix="name its folder in kv_disk")
        return None
    path = Path(cache.kv_disk).expanduser()
    space_bytes = _half_of_free(path) if cache.kv_disk_space is None else int(cache.kv_disk_space * _GIB)
    return DiskStore(path, space_bytes)


def identity_of(model: ModelDimensions, params: Params, config: EngineConfig) -> bytes:
    """Digest of a model, its weights and the formats of its KV. Reads every weight once."""
    # without adapters: the digests of an adapter's contexts have a salt of their own
    leaves, structure = jax.tree.flatten(without_adapters(params))
    with ThreadPoolExecutor() as threads:
        checksums = [*threads.map(_checksum, leaves)]
    formats = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    cache, platform = config.cache, leaves[0].device.platform if len(leaves[0].devices()) == 1 else "several"
    facts = (_FORMAT, repr(model), str(structure), formats, checksums, platform)
    options = (config.model.dtype, config.model.activation_dtype, cache.kv_cache_dtype, cache.page_size)
    return hashlib.sha256(repr((facts, options)).encode()).digest()


def priced(profile: Profile, store: DiskStore, token_bytes: float) -> Profile:
    """A profile with the measured speed of a store's disk; logs it, with the store's use.

    `token_bytes` are those of a token's KV here: a profile of another machine may have more.
    """
    try:
        speed = store.speed()
    except OSError as error:
        raise ConfigError("kv_disk cannot be measured", got=error, fix="give a folder on a disk that works") from None
    used = store.occupancy()
    log.info(
        "disk tier: %.1f of %.1f GiB hold contexts; reads %.2f GB/s after %.1f ms, writes %.2f GB/s",
        used.used_bytes / _GIB,
        used.total_bytes / _GIB,
        speed.read_bytes_per_s / 1e9,
        speed.latency_s * 1e3,
        speed.write_bytes_per_s / 1e9,
    )
    return replace(
        profile,
        disk_read_tokens_per_s=speed.read_bytes_per_s / token_bytes,
        disk_write_tokens_per_s=speed.write_bytes_per_s / token_bytes,
        disk_latency_s=speed.latency_s,
    )


def _half_of_free(path: Path) -> int:
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    # its own data counts as free
    used = sum(file.stat().st_blocks * 512 for file in existing.glob("data-*")) if existing == path.absolute() else 0
    return (shutil.disk_usage(existing).free + used) // 2


def _checksum(weight: jax.Array) -> int:
    return zlib.crc32(np.ascontiguousarray(np.asarray(weight)).reshape(-1).view(np.uint8).data)
