"""The product that applies weights: few bfloat16 rows get more of them, which changes no result."""

import jax
import numpy as np
import pytest
from flax import nnx

from jinfercept.cpu_kernels import native
from jinfercept.models.blocks import project


def values(*shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_give_what_they_give_among_many(rows: int) -> None:
    x, weight = values(8, 64), nnx.Param(values(64, 2, 16))
    product = jax.jit(lambda x: project("te,ehd->thd", x, weight))
    np.testing.assert_array_equal(product(x[:rows]), product(x)[:rows])


def test_a_product_over_two_axes_is_einsums() -> None:
    x, weight = values(5, 3, 16, dtype="float32"), nnx.Param(values(3, 16, 7, dtype="float32") + 1)
    expected = np.einsum("thd,hde->te", x, weight[...])
    np.testing.assert_allclose(project("thd,hde->te", x, weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_single_row_is_given_more_on_every_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda: False)
    traced = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).trace(values(1, 64), values(64, 32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.pad" in text
    assert "HIGHEST" not in text


def test_float32_rows_stay_as_they_are() -> None:
    x, weight = values(1, 64, dtype="float32"), values(64, 32, dtype="float32")
    text = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).lower(x, weight).as_text()
    assert "stablehlo.pad" not in text
    assert "HIGHEST" in text
