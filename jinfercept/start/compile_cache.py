"""Counts compilations, and checks JAX's compilation cache.

An entry is damaged by a process that ends while it writes, or by a full disk; JAX reports it at every start but never replaces
it. Entries are checked once, at the first start after they were written: the file `.checked` has the time of the last check.
"""

import logging
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

import jax

from jinfercept.errors import ConfigError, describe_failure

log = logging.getLogger(__name__)

_ENTRIES, _STAMP = "*-cache", ".checked"
_ZSTD = b"\x28\xb5\x2f\xfd"
_WRITING_S = 60.0
"""Age of an entry below which another process may still write it."""


def check_bucket(directory: str) -> None:
    """Make the folder of a cache that is named by a URL (`gs://BUCKET/FOLDER`). A local folder is not touched.

    Raises:
        ConfigError: a package for such URLs is missing, or none is for them: JAX would warn at every executable and keep none.
    """
    scheme, separator, _ = directory.partition("://")
    if not separator or scheme == "file":
        return
    packages = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
    try:
        from etils import epath

        epath.Path(directory).mkdir(parents=True, exist_ok=True)
    except (ImportError, KeyError, NotImplementedError) as error:
        schemes = ", ".join(f"{name}://" for name in packages)
        fix = f"pip install {packages[scheme]}" if scheme in packages else f"a folder, or a bucket with {schemes}"
        got = f"{directory} ({describe_failure(error)})"
        raise ConfigError("JAX cannot use this compilation cache", got=got, fix=fix) from error
    except Exception as error:  # of the bucket's own library: no access, no network
        # JAX goes on without the cache
        log.warning("the compilation cache %s does not answer: %s", directory, describe_failure(error))


def drop_damaged(directory: Path) -> list[Path]:
    """Delete the entries that cannot be unpacked, each with a warning; returns them. A read-only directory stays as it is."""
    dropped = list[Path]()
    if not os.access(directory, os.W_OK):
        return dropped
    began_s = time.time()
    with suppress(OSError):  # another process may delete too
        # entries of the last minute are left to the next check
        for entry in _new_entries(directory, began_s - _WRITING_S):
            if not _unpacks(entry.read_bytes()):
                entry.unlink()
                dropped.append(entry)
                log.warning("dropped a damaged entry of JAX's compilation cache, which is compiled again: %s", entry)
        stamp = directory / _STAMP
        stamp.touch()
        os.utime(stamp, (began_s - _WRITING_S, began_s - _WRITING_S))
    return dropped


def _new_entries(directory: Path, until_s: float) -> Iterator[Path]:
    stamp = directory / _STAMP
    since_s = stamp.stat().st_mtime if stamp.is_file() else 0.0
    return (entry for entry in directory.glob(_ENTRIES) if since_s <= entry.stat().st_mtime < until_s)


def _unpacks(entry: bytes) -> bool:
    # JAX packs with zlib, or, where it is installed, with zstandard: not checked.
    try:
        zlib.decompress(entry)
    except zlib.error:
        return entry.startswith(_ZSTD)
    return True


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@final
class CompileCounter:
    """Counts XLA compilations of the process from its creation on: `count`, of which `cached` were found on disk."""

    def __init__(self) -> None:
        self.count = self.cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_for_hits)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILE_EVENT

    def _listen_for_hits(self, event: str, **_: str | int) -> None:
        self.cached += event == _CACHE_HIT_EVENT

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_for_hits)
