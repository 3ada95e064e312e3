"""Engines that are alike share executables in tests, but not what a test has replaced."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from jinfercept.runner import filters
from jinfercept.runner.executables import Executables
from tests.support.compiled_once import TRACED
from tests.support.traced_files import TracedFiles


def by_bits(factor: int, x: jax.Array) -> jax.Array:
    return factor * filters.BITS * x


def executable(factor: int = 1) -> jax.stages.Compiled:
    run = Executables()
    run.add("product", lambda x: by_bits(factor, x), jnp.ones(4))
    run.compile()
    return run._compiled["product"]


def test_the_same_function_of_the_same_shapes_is_compiled_once() -> None:
    assert executable() is executable()
    assert executable(2) is not executable()


def test_what_a_test_replaces_is_traced_again_and_only_while_it_is_replaced() -> None:
    before = executable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "BITS", filters.BITS + 1)
        assert executable()(jnp.ones(4))[0] == before(jnp.ones(4))[0] + 1
    assert executable() is before


def test_another_process_would_find_what_was_compiled_of_the_same_but_nothing_of_functions_that_its_sources_do_not_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    files, others = (TracedFiles(monkeypatch, TRACED) for _ in range(2))
    argument = jnp.arange(4.0)
    key, other = (files.key((filters.is_filtered, jax.ShapeDtypeStruct((size,), "float32"))) for size in (4, 5))
    assert key is not None
    assert key != other
    assert files.key(by_bits) is files.key(lambda x: x) is None
    assert others.read(key) is None
    lowered = jax.jit(lambda x: 2 * x + 1).lower(argument)
    made, found = files.compile(key, lowered, {}), others.read(key)
    assert found is not None
    assert found(argument).tolist() == made(argument).tolist() == [1, 3, 5, 7]
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", lambda *_: (None, None))
    assert others.read(key) is None  # JAX's cache has lost it
