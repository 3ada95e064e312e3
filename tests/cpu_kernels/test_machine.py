"""What a process may use of its machine, by trees of files as containers have them."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.machine import Memory, memory, num_processors
from jinfercept.cpu_kernels.native import cached
from tests.support.attention_steps import Shapes, make_step
from tests.support.pretend import older_cpu
from tests.support.quantized_weight import weight

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


PRODUCTS = """
import os, sys
import jax, jax.numpy as jnp
from jinfercept.cpu_kernels import native, products

def product():
    emit, emitted = native._emit, []
    native._emit = lambda module, machine: emitted.append(module) or emit(module, machine)
    x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    y = jax.jit(lambda x, weight: products.dense_product(x, weight, transposed=False, out="float32"))(x, weight)
    assert (y == 64).all(), y
    print(len(emitted), flush=True)

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
for _ in range(2):  # JAX is imported once, and begins in the children
    child = os.fork()
    if not child:
        product()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that gets entries."""
    monkeypatch.setattr(native, "_folder", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


def never() -> bytes:
    raise AssertionError("it is on the disk")


def test_an_entry_is_read_where_all_that_it_depends_on_is_equal(folder: Path) -> None:
    assert cached("sum", ["avx2"], lambda: b"first") == b"first"
    assert cached("sum", ["avx2"], never) == b"first"
    assert cached("sum", ["avx512f"], lambda: b"second") == b"second"
    assert cached("product", ["avx2"], lambda: b"third") == b"third"
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(100)])
def test_a_damaged_entry_is_replaced(folder: Path, damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    cached("sum", [], lambda: b"code")
    [entry] = folder.iterdir()
    entry.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert cached("sum", [], lambda: b"code") == b"code"
    assert "damaged" in caplog.text
    assert cached("sum", [], never) == b"code"


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    try:
        for directory in (None, "", "gs://bucket/xla", str(tmp_path / "file")):
            jax.config.update("jax_compilation_cache_dir", directory)
            assert cached("sum", [], lambda: b"code") == b"code"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.skipif(not native.usable(), reason="this CPU has no AVX2")
def test_another_process_runs_the_code_of_the_first(tmp_path: Path) -> None:
    run = [sys.executable, "-c", PRODUCTS, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.split(), done.returncode) == (["2", "0"], 0), done.stderr


pytestmark = pytest.mark.skipif(not native.usable(), reason="kernels need llvmlite and an x86 CPU with AVX2")
EXISTING = {"sched_yield", "syscall", "memset", "memcpy", "memmove"}
OWN = {"item", "work", "pool"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are traced, none of them compiled for this CPU."""
    traced: list[Any] = []
    older_cpu(monkeypatch)
    monkeypatch.setattr(native, "target", lambda kernel: traced.append(kernel) or "not called")
    return traced


def called(kernel: Any) -> set[str]:
    """Names of functions and variables that a kernel's machine code refers to."""
    import llvmlite.binding as llvm

    from jinfercept.cpu_kernels.threads import handler

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu="x86-64-v3", opt=3, jit=True)
    text = machine.emit_assembly(llvm.parse_assembly(str(handler("kernel", kernel))))
    return set(re.findall(r"(?:call\w*|movabs\w*|jmp)\s+\$?([A-Za-z_]\w+)", text)) - OWN


def test_products_and_attention_call_no_function_of_a_compilers_library(kernels: list[Any]):
    from jinfercept.cpu_kernels import chunks, decode, products
    from jinfercept.models import quantized

    def dense(x: jax.Array, w: jax.Array, tied: jax.Array) -> list[jax.Array]:
        return [
            products.dense_product(rows, matrix, transposed=transposed, out="bfloat16")
            for rows in (x[:2], x)
            for matrix, transposed in ((w, False), (tied, True))
        ]

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    jax.eval_shape(dense, shape(32, 64), shape(64, 96), shape(96, 64))
    for bits in (4, 8):
        packed, _ = weight(64, 96, bits=bits, group=32, offset=True)
        for rows in (1, 40):
            jax.eval_shape(lambda x, packed=packed: quantized.product(x, packed, jnp.bfloat16), shape(rows, 64))
    numbers = jax.ShapeDtypeStruct((5,), jnp.int32)
    stack = jax.ShapeDtypeStruct((5, 64, 64), jnp.bfloat16)
    jax.eval_shape(products.grouped_product, shape(3, 64), stack, numbers, numbers, numbers)
    q, pages, batch = make_step(
        Shapes(140, 11, 14, 16, 9, 3, 32), 2, [(1, 7), (1, 20), (40, 100)], 4, dtype=jnp.bfloat16
    )
    answer = jax.eval_shape(decode.decode_attention, q, pages, batch, batch.num_decode)
    if chunks.supports(q, pages):
        jax.eval_shape(chunks.chunk_attention, q, pages, batch, answer)
    different = {repr(kernel): kernel for kernel in kernels}
    assert len(different) >= 8, sorted(different)
    unknown = {name: called(kernel) - EXISTING for name, kernel in different.items()}
    assert not any(unknown.values()), unknown
