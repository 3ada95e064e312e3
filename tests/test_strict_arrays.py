"""Shapes in annotations are checked in tests, as `tests/support/strict_arrays.py` promises."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jinfercept.layouts.rows import rms_normed
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
