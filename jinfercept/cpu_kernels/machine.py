"""The memory and the processors that this process may use, as far as its cgroups and their parents allow.

A container's limits are those of cgroups, of version 2 or 1, which `/proc/self/cgroup` names and `/proc/self/mountinfo` places.
Where a namespace hides the cgroup's path, its files lie where the controller is mounted.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class Memory(NamedTuple):
    """Bytes of memory: all, and those that can still be taken. File cache that the system gives back counts as free."""

    total: int
    available: int


def memory(root: Path = ROOT) -> Memory:
    """The memory of this process: the machine's, or less in a cgroup with a limit. `root` is the file system with `/proc` and
    the cgroups."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for group in _groups(root, "memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most = _numbers(group / limit)[:1]
            if most and most[0] < machine.total:  # version 1 has a large number for no limit
                used = sum(_numbers(group / usage)[:1]) - _stat(group / "memory.stat", cache)
                total, available = min(total, most[0]), min(available, max(0, most[0] - used))
    return Memory(total, available)


def num_processors(root: Path = ROOT) -> int:
    """The processors that this process may use at a time, at least one; a part of one counts as one. `root`: as of `memory`."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quotas = [_numbers(group / "cpu.max")]
        quotas.append([*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")])
        count = min([count, *(max(1, -(-quota[0] // quota[1])) for quota in quotas if len(quota) == 2 and quota[1])])
    return count


def return_freed_memory() -> None:
    """Return freed memory to the system: while weights load, glibc would keep a fifth of their size for later."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    paths = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        mounted, mount_point = place.split()[3:5]
        version, _, options = kind.split(maxsplit=2)
        for _, controllers, path in paths:
            is_unified = version == "cgroup2" and not controllers
            if is_unified or (
                version == "cgroup" and controller in controllers.split(",") and controller in options.split(",")
            ):
                own = Path(path)
                inner = own.relative_to(mounted) if own.is_relative_to(mounted) and ".." not in own.parts else Path()
                top = root / mount_point.replace("\\040", " ").lstrip("/")
                yield from (top / part for part in (inner, *inner.parents))


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text().splitlines() if line]
    except OSError:  # no such file, or no Linux
        return []


def _numbers(file: Path) -> list[int]:
    # without words and numbers below 0, which stand for no limit
    return [int(word) for line in _lines(file) for word in line.split() if word.isdecimal()]


def _stat(file: Path, name: str) -> int:
    return sum(int(line.split()[1]) for line in _lines(file) if line.split()[:1] == [name])
