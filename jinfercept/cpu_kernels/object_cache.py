"""Machine code of CPU kernels on disk, beside the executables that JAX keeps there: to compile them takes LLVM seconds.

An entry is named after its kernel and a digest of all that its code depends on, and begins with a digest of itself.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import jax

log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


def cached(name: str, depends_on: Iterable[str], emit: Callable[[], bytes]) -> bytes:
    """The kernel's object file: from the disk, or emitted and written there.

    Without a compilation cache of JAX in a local directory that can be written, it is emitted every time. Several processes may
    ask at once. A damaged entry is replaced.

    Args:
        depends_on: what tells one object file of the kernel from another, beside the source code of the kernels.
        emit: makes the object file.
    """
    folder = _folder()
    if folder is None:
        return emit()
    digest = hashlib.sha256("\n".join((_sources(), name, *depends_on)).encode()).hexdigest()
    path = folder / f"{name}-{digest[:32]}"
    code = _read(path)
    if code is None:
        code = emit()
        _write(path, code)
    return code


def _folder() -> Path | None:
    directory = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return None if not directory or "://" in directory else Path(directory) / "kernels"


@cache
def _sources() -> str:
    """A digest of the modules from which kernels are emitted, and of those of the layouts that they read."""
    package = Path(__file__).parents[1]
    files = sorted(file for room in ("cpu_kernels", "layouts") for file in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    log.warning("the cached kernel %s is damaged, it is compiled again", path)
    return None


def _write(path: Path, code: bytes) -> None:
    """Under its name at once, so that no process reads a part of it. A directory that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
