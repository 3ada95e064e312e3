"""The product that applies weights: few bfloat16 rows get more of them, which changes no result; adapters add to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jinfercept.cpu_kernels import native
from jinfercept.models.adapted import AdaptedTensor
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


def adapted(rows: np.ndarray) -> AdaptedTensor:
    """A weight with two adapters of rank 4, some of which the rows have."""
    base, a, b = (values(*shape, dtype="float32") for shape in ((64, 32), (64, 1, 8), (8, 32)))
    return AdaptedTensor(base, a, (b,), jnp.asarray(rows))


def test_rows_get_what_their_adapters_add_and_steps_without_any_get_the_base() -> None:
    x, product = values(3, 64, dtype="float32"), jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight)))
    rows = np.array([[False, False], [True, False], [False, True]])
    weight = adapted(rows)
    base, inner = x @ weight.base, (x @ weight.a[:, 0]).reshape(3, 2, 4)
    change = jnp.where(rows[..., None], inner, 0).reshape(3, 8) @ weight.b[0]
    np.testing.assert_allclose(product(x, weight), base + change, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product(x, adapted(np.zeros_like(rows))), product(x, weight.base))


@pytest.mark.parametrize(("platform", "branches"), [("cpu", True), ("cuda", False)])
def test_only_a_cpu_branches_on_whether_a_row_has_an_adapter(platform: str, branches: bool) -> None:
    weight = adapted(np.zeros((1, 2), bool))
    traced = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).trace(
        values(1, 64, dtype="float32"), weight
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()  # the platform is a case of its own, and constant
    assert ("stablehlo.or" in text) is branches
