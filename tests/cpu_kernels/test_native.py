"""Machine code of kernels on disk: read again, never where anything differs, replaced when damaged."""

import logging
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.native import cached

PRODUCTS = """
import os, sys
import jax, jax.numpy as jnp
from jinfercept.cpu_kernels import dense_product, native

def product():
    emit, emitted = native._emit, []
    native._emit = lambda module, machine: emitted.append(module) or emit(module, machine)
    x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    y = jax.jit(lambda x, weight: dense_product.product(x, weight, transposed=False, out="float32"))(x, weight)
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
