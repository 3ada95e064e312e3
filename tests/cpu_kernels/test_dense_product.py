"""Kernels of a CPU that llvmlite compiles: products against numpy, several threads, a fork, a machine without llvmlite."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.cpu_kernels import native
from tests.support.pretend import older_cpu

pytestmark = pytest.mark.skipif(not native.usable(), reason="this CPU has no AVX2")
ALONE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp

if (child := os.fork()) == 0:  # a process without llvmlite, which need not import JAX again
    sys.modules["llvmlite"] = None
    from jinfercept.cpu_kernels import native
    os._exit(native.usable())
print("without llvmlite", os.waitpid(child, 0)[1])

from jinfercept.cpu_kernels import native, products
x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 640), jnp.bfloat16)
y = jax.jit(lambda x, weight: products.dense_product(x, weight, transposed=False, out="float32"))(x, weight)
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
assert "jinfercept" not in names, names
print(native.num_threads(), jnp.unique(y))
"""


@dataclass(frozen=True)
class Narrowing:
    """A kernel that rounds float32 to bfloat16, eight numbers at a time."""

    def num_items(self, code: Any) -> Any:
        return code.dim(0, 0) // 8

    def item(self, code: Any, index: Any) -> None:
        from jinfercept.cpu_kernels.code import BF16, F32

        code.ret(0, BF16).put(index * 8, [code.arg(0, F32).vector(index * 8, 8)])


def operands(rows: int, depth: int, columns: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    x, weight = jax.random.split(jax.random.key(seed))
    return (
        jax.random.normal(x, (rows, depth), jnp.bfloat16),
        jax.random.normal(weight, (depth, columns), jnp.bfloat16),
    )


def product(x: jax.Array, weight: jax.Array, *, transposed: bool, out: str = "float32") -> jax.Array:
    from jinfercept.cpu_kernels import products

    assert products.supports_dense(x.shape, weight.shape, x.dtype, weight.dtype, transposed=transposed)
    return jax.jit(lambda x, weight: products.dense_product(x, weight, transposed=transposed, out=out))(x, weight)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


@settings(max_examples=6)
@given(
    rows=st.sampled_from([1, 3, 8, 13, 32, 77, 300]),
    depth=st.integers(1, 5).map(lambda n: 32 * n),
    columns=st.integers(1, 5).map(lambda n: 32 * n),
    transposed=st.booleans(),
    out=st.sampled_from(["float32", "bfloat16"]),
    older=st.booleans(),
)
def test_a_product_is_that_of_float32(rows: int, depth: int, columns: int, transposed: bool, out: str, older: bool):
    older = older or "avx512bf16" not in native.features()
    x, weight = operands(min(rows, 32) if transposed or older else rows, depth, columns)
    with pytest.MonkeyPatch.context() as patch:
        if older:
            older_cpu(patch)
        got = product(x, weight.T if transposed else weight, transposed=transposed, out=out)
    assert got.dtype == out
    np.testing.assert_allclose(wide(got), wide(x) @ wide(weight), atol=1e-3, rtol=1e-2 if out == "bfloat16" else 1e-3)


def test_a_cpu_without_an_instruction_for_it_rounds_to_bfloat16_as_jax_does(monkeypatch: pytest.MonkeyPatch):
    upper, lower = np.arange(1 << 16, dtype=np.uint32) << 16, np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    numbers = jnp.asarray(np.resize((upper[:, None] | lower).ravel(), 5 << 16).view(np.float32))
    older_cpu(monkeypatch)
    result = native.call(Narrowing(), jax.ShapeDtypeStruct(numbers.shape, jnp.bfloat16), numbers)
    np.testing.assert_array_equal(wide(result), wide(numbers.astype(jnp.bfloat16)))


def test_several_threads_call_one_kernel_at_once():
    x, weight = operands(3, 64, 3200)
    expected = wide(x) @ wide(weight)

    def check(_: int) -> None:
        np.testing.assert_allclose(product(x, weight, transposed=False), expected, atol=1e-3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(64)))


def test_helpers_that_sleep_are_woken():
    x, weight = operands(3, 64, 3200)
    before = product(x, weight, transposed=False)
    for _ in range(20):
        time.sleep(0.01)
        np.testing.assert_array_equal(product(x, weight, transposed=False), before)


def test_on_one_core_the_caller_is_alone_and_without_llvmlite_there_are_no_kernels():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("without llvmlite 0\n1 [64.]\n", 0), done.stderr


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_kernels_work_on_when_the_process_has_forked():
    x, weight = operands(3, 64, 3200)
    before = product(x, weight, transposed=False)
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(product(x, weight, transposed=False), before)
