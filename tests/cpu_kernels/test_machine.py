"""What a process may use of its machine, by trees of files as containers have them."""

import os
from pathlib import Path

import psutil
import pytest

from jinfercept.cpu_kernels.machine import Memory, memory, num_processors

GIB = 1 << 30
V2 = "29 23 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = [
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct",
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
]
NO_LIMIT = "9223372036854771712"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, of which 50 are free, and of 16 processors."""
    now = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now._replace(total=64 * GIB, available=50 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def tree(root: Path, cgroup: str, mounts: list[str], files: dict[str, object]) -> Path:
    """A file system: the process's cgroups, the mounts, and files below `/sys/fs/cgroup`."""
    contents = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(mounts)}
    for name, content in (contents | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def v2(path: str, most: object, used: float = 0, cache: int = 0) -> dict[str, object]:
    return {
        f"{path}memory.max": most,
        f"{path}memory.current": used,
        f"{path}memory.stat": f"anon 5\nfile 9\ninactive_file {cache}\nslab 3",
    }


def v1(path: str, most: object, used: int = 0, cache: int = 0) -> dict[str, object]:
    return {
        f"memory{path}/memory.limit_in_bytes": most,
        f"memory{path}/memory.usage_in_bytes": used,
        f"memory{path}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}",
    }


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        ("0::/", [V2], v2("", 3 * GIB, 2 * GIB, GIB), Memory(3 * GIB, 2 * GIB)),
        ("0::/", [V2], v2("", "max", 2 * GIB), Memory(64 * GIB, 50 * GIB)),
        ("0::/a/b", [V2], v2("a/b/", "max", GIB) | v2("a/", 4 * GIB, 3 * GIB), Memory(4 * GIB, GIB)),
        ("0::/a/b", [V2], v2("a/b/", 2 * GIB, GIB) | v2("a/", 8 * GIB, 7.5 * GIB), Memory(2 * GIB, GIB // 2)),
        ("0::/../c", [V2], v2("", 3 * GIB), Memory(3 * GIB, 3 * GIB)),
        ("0::/a", [V2.replace("0:25 /", "0:25 /a")], v2("", 3 * GIB, 5 * GIB), Memory(3 * GIB, 0)),
        ("4:memory:/d\n3:cpu,cpuacct:/d", V1, v1("/d", 3 * GIB, GIB, GIB // 2), Memory(3 * GIB, 5 * GIB // 2)),
        ("4:memory:/d", V1, v1("/d", NO_LIMIT) | v1("", NO_LIMIT), Memory(64 * GIB, 50 * GIB)),
        ("4:memory:/d/e", V1, v1("/d/e", NO_LIMIT) | v1("/d", GIB), Memory(GIB, GIB)),
        ("4:memory:/d/e", [line.format(root="/d") for line in V1], v1("/e", 2 * GIB), Memory(2 * GIB, 2 * GIB)),
        ("4:memory:/x\n0::/x", [*V1, V2.replace("cgroup rw", "cgroup/unified rw")], v1("/x", GIB), Memory(GIB, GIB)),
        ("", [], {}, Memory(64 * GIB, 50 * GIB)),
    ],
)
def test_memory_is_the_least_of_the_machine_and_all_cgroups(
    tmp_path: Path, cgroup: str, mounts: list[str], files: dict[str, object], expected: Memory
) -> None:
    whole = {name: int(value) if isinstance(value, float) else value for name, value in files.items()}
    mounts = [line.format(root="/") for line in mounts]
    assert memory(tree(tmp_path, cgroup, mounts, whole)) == expected


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        ("0::/", [V2], {"cpu.max": "200000 100000"}, 2),
        ("0::/", [V2], {"cpu.max": "150000 100000"}, 2),
        ("0::/", [V2], {"cpu.max": "1000 100000"}, 1),
        ("0::/", [V2], {"cpu.max": "max 100000"}, 16),
        ("0::/a", [V2], {"a/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3),
        (
            "3:cpu,cpuacct:/d",
            V1,
            {"cpu,cpuacct/d/cpu.cfs_quota_us": 250000, "cpu,cpuacct/d/cpu.cfs_period_us": 50000},
            5,
        ),
        ("3:cpu,cpuacct:/d", V1, {"cpu,cpuacct/d/cpu.cfs_quota_us": -1, "cpu,cpuacct/d/cpu.cfs_period_us": 100000}, 16),
        ("0::/", [V2], {"cpu.max": "6400000 100000"}, 16),
    ],
)
def test_processors_are_the_least_of_the_affinity_and_all_quotas(
    tmp_path: Path, cgroup: str, mounts: list[str], files: dict[str, object], expected: int
) -> None:
    mounts = [line.format(root="/") for line in mounts]
    assert num_processors(tree(tmp_path, cgroup, mounts, files)) == expected
