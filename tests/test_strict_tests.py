"""What tests do to all code: engines that are alike share executables, and annotated shapes are checked."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jinfercept.pallas.layouts.rows import rms_normed
from jinfercept.runner import sampling
from jinfercept.runner.executables import Executables
from tests.support.strict_arrays import explicit


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="K=8"):
        rms_normed(jnp.zeros((4, 8)), jnp.zeros(4), 1e-6)


def test_a_silent_broadcast_or_cast_is_an_error() -> None:
    with explicit():
        with pytest.raises(ValueError, match="rank_promotion"):
            jnp.add(jnp.zeros((4, 8)), jnp.zeros(8))
        with pytest.raises(ValueError, match="promotion"):
            jnp.add(jnp.zeros(8, jnp.bfloat16), jnp.zeros(8))


def by_bits(factor: int, x: jax.Array) -> jax.Array:
    return factor * sampling.BITS * x


def executable(factor: int = 1) -> jax.stages.Compiled:
    run = Executables()
    run.add("product", lambda x: by_bits(factor, x), jnp.ones(4))
    run.compile()
    return run.ready["product"]


def test_the_same_function_of_the_same_shapes_is_compiled_once() -> None:
    assert executable() is executable()
    assert executable(2) is not executable()


def test_what_a_test_replaces_is_traced_again_and_only_while_it_is_replaced() -> None:
    before = executable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BITS", sampling.BITS + 1)
        assert executable()(jnp.ones(4))[0] == before(jnp.ones(4))[0] + 1
    assert executable() is before
