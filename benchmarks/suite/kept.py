"""What one run leaves for the next: XLA's choices of kernels, and compiled executables, as a few files of limited size.

All of it lies in the directory of the compilation cache: JAX's entries, XLA's autotuning of every fusion (a subfolder, which
JAX names to XLA by itself), and in `autotune/` what each part's process chose, in XLA's text format. Imports no JAX.
"""

import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

CHOICES = "autotune"
"""Subfolder of the parts' choices."""
MOST_BYTES = 15 << 20
"""Of one file: a machine may return no larger ones."""
MOST_CACHE_FILES = 2


def choices_flag(cache: Path) -> str:
    """XLA's flag that writes the choices of a process. Its text is the same for all parts: it is part of the cache's keys."""
    return f"--xla_gpu_dump_autotune_results_to={_choices(cache)}"


def keep_choices(cache: Path, part: str) -> None:
    """Name what a process has chosen by its part. One that finds executables compiled chooses less: the earlier stays."""
    last, named = _choices(cache), cache / CHOICES / f"{part}.textproto"
    if last.exists() and (not named.exists() or last.stat().st_size >= named.stat().st_size):
        os.replace(last, named)
    last.unlink(missing_ok=True)


def unpack(kept: Path, cache: Path) -> list[str]:
    """Put the files of an earlier run back, as files of this run; returns the archives' names.

    Of an archive that was cut off, what is whole counts.
    """
    (cache / CHOICES).mkdir(parents=True, exist_ok=True)
    packed = sorted(kept.glob("*.tar"))
    for path in packed:
        with suppress(OSError, tarfile.TarError), tarfile.open(path) as tar:
            for member in tar:
                place, file = cache / member.name, tar.extractfile(member)
                if file is not None and place.resolve().is_relative_to(cache.resolve()):
                    content = file.read()
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content)
    return [path.name for path in packed]


def pack(cache: Path, since_s: float, out: Path, *, tunes: bool = True) -> None:
    """Write `autotune.tar` and `cache-1.tar`, … with what a run has written, the oldest first, until they are full.

    Args:
        since_s: when the run began, in seconds of the epoch; what `unpack` has put back counts too.
        out: folder of the files.
        tunes: there are choices of kernels.
    """
    fresh = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_mtime >= since_s]
    fresh.sort(key=lambda path: path.stat().st_mtime)
    entries = [path for path in fresh if path.parent == cache and not path.name.startswith(".")]
    if tunes:
        _write(out / "autotune.tar", cache, _fill([path for path in fresh if path.parent != cache], 1)[0])
    for number, some in enumerate(_fill(entries, MOST_CACHE_FILES), 1):
        _write(out / f"cache-{number}.tar", cache, some)


def _fill(paths: Sequence[Path], count: int) -> list[list[Path]]:
    """At most so many groups of files, none larger than `MOST_BYTES` as an archive; the first one is there even if empty."""
    groups: list[list[Path]] = [[]]
    size, most = 0, MOST_BYTES - tarfile.RECORDSIZE
    for path in paths:
        packed = path.stat().st_size + 2 * tarfile.BLOCKSIZE
        if packed > most:
            continue
        if size + packed > most:
            if len(groups) == count:
                break
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += packed
    return groups


def _write(path: Path, root: Path, files: Iterable[Path]) -> None:
    """The whole archive or the last one, never half of it."""
    partial = path.with_name(f"{path.name}.partial")
    with tarfile.open(partial, "w") as tar:
        for file in files:
            content = file.read_bytes()
            member = tarfile.TarInfo(str(file.relative_to(root)))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    os.replace(partial, path)


def _choices(cache: Path) -> Path:
    return cache / CHOICES / "last.textproto"
